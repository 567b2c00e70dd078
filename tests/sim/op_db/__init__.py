"""PyTorch's operator database as a conformance test of a device against the CPU.

    results.py            what is known of one operator after its run: small records, JSON lines between processes
    entries.py            which operators, which samples of each
    operands.py           the same operands on another device: strides, aliases and gradients kept
    compare.py            values, dtypes and shapes of two results
    modes.py              what is done with an operator: forward, backward; the base for further modes
    managed.py            modes with managed operands: resident, spilled, split over devices, allocations failing
    runner.py             one forked child an operator, so that a crash or a hang is counted and not fatal
    expected_failures.py  the only place where a failure is excused, with its reason
    conformance.py        for a pytest file: start the runner, judge its records by the table

Run by hand, from the root of the repository::

    python -m tests.sim.op_db --device sim --mode forward --only add

Every module imports its neighbours relatively, because pytest sees this package as ``sim.op_db`` and the command line
as ``tests.sim.op_db``.
"""
