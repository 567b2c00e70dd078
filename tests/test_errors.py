"""The package's own exceptions as a family."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from managed_exec import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
LEAVES = [cls for cls in CLASSES if cls is not errors.ManagedExecError]


def test_there_are_some() -> None:
    assert {errors.PlacementError, errors.SimulatorBusyError, errors.SimulatorUnavailableError} <= set(CLASSES)


@pytest.mark.parametrize("cls", LEAVES)
def test_is_caught_by_the_base_and_by_a_class_of_the_standard_library(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.ManagedExecError)
    known = [base for base in cls.__mro__ if base.__module__ in ("builtins", "concurrent.futures._base")]
    assert known[0] is not Exception, "a program that knows nothing of this package catches it as well"
    assert cls.__name__.endswith("Error")


@pytest.mark.parametrize("cls", LEAVES)
def test_says_whose_fault_it_is(cls: type[Exception]) -> None:
    first, _, rest = str(inspect.getdoc(cls)).partition("\n\n")
    assert first.endswith(".")
    assert re.match(r"(The [\w ]+|Nobody)'s \w+", rest), rest


@pytest.mark.parametrize("cls", CLASSES)
def test_survives_pickling(cls: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(cls("what happened")))
    assert type(error) is cls
    assert str(error) == "what happened"
