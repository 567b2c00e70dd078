"""The sphere example: its geometry, its numbers, and both executors."""

from __future__ import annotations

import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs import imported, run_example

from managed_exec import GPUPoolExecutor


@pytest.fixture(scope="module")
def pde():
    with imported("pde_solve") as module:
        yield module


def refined(pde, level):
    sphere = pde.icosahedron()
    for _ in range(level):
        sphere, _ = pde.subdivide(sphere)
    return sphere


def rings_around(start, neighbours, count):
    """Breadth-first search in plain Python: the vertices at most `count` edges away from `start`."""
    reached = set(start)
    front = set(start)
    for _ in range(count):
        front = {other for vertex in front for other in neighbours[vertex]} - reached
        reached |= front
    return reached


@pytest.mark.parametrize("level", [0, 1, 3])
def test_sphere_is_closed_and_regular(pde, level):
    sphere = refined(pde, level)
    assert len(sphere.vertices) == 10 * 4**level + 2
    assert len(sphere.triangles) == 20 * 4**level
    torch.testing.assert_close(sphere.vertices.norm(dim=1), torch.ones(len(sphere.vertices), dtype=torch.float64))
    sides = sphere.triangles[:, [0, 1, 1, 2, 2, 0]].view(-1, 2).sort(dim=1).values
    edges, uses = sides.unique(dim=0, return_counts=True)
    assert (uses == 2).all()
    assert len(sphere.vertices) - len(edges) + len(sphere.triangles) == 2
    degrees = edges.flatten().bincount()
    assert (degrees == 5).sum() == 12
    assert ((degrees == 5) | (degrees == 6)).all()


def test_stiffness_is_the_cotangent_laplacian(pde):
    sphere = refined(pde, 1)
    matrix, mass = pde.assemble(sphere)
    expected = torch.zeros(matrix.shape, dtype=torch.float64)
    for triangle in sphere.triangles.tolist():
        for turn in range(3):
            at, one, other = triangle[turn:] + triangle[:turn]
            to_one = sphere.vertices[one] - sphere.vertices[at]
            to_other = sphere.vertices[other] - sphere.vertices[at]
            cosine = float(to_one @ to_other / (to_one.norm() * to_other.norm()))
            half_cotangent = 0.5 / math.tan(math.acos(cosine))
            for row, column in ((one, other), (other, one)):
                expected[row, column] -= half_cotangent
                expected[row, row] += half_cotangent
    torch.testing.assert_close((matrix - mass).to_dense(), expected)


def test_mass_is_the_area(pde):
    _, mass = pde.assemble(refined(pde, 4))
    assert float(mass.values().sum()) == pytest.approx(4 * math.pi, rel=5e-3)


def test_harmonic_is_normalised_and_an_eigenfunction(pde):
    sphere = refined(pde, 4)
    matrix, mass = pde.assemble(sphere)
    values = pde.harmonic(sphere.vertices)
    assert float(values @ (mass @ values)) == pytest.approx(1, rel=2e-2)
    quotient = float(values @ (matrix @ values) / (values @ (mass @ values)))
    assert quotient - 1 == pytest.approx(pde.EIGENVALUE, rel=2e-2)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_patches_own_every_vertex_once_and_overlap(pde, overlap):
    problem = pde.build(level=3, patches=9, overlap=overlap)
    owned = torch.cat([patch.vertices[: patch.owned] for patch in problem.patches])
    assert owned.sort().values.tolist() == list(range(len(problem.exact)))

    dense = problem.matrix.to_dense()
    neighbours = [row.nonzero().flatten().tolist() for row in dense]
    for patch in problem.patches:
        own, everything = patch.vertices[: patch.owned].tolist(), patch.vertices.tolist()
        assert len(set(everything)) == len(everything)
        assert set(everything) == rings_around(own, neighbours, overlap)
        torch.testing.assert_close(patch.matrix.to_dense(), dense[patch.vertices][:, patch.vertices], rtol=0, atol=0)


def test_patches_are_uneven(pde):
    sizes = [len(patch.vertices) for patch in pde.build(level=4, patches=24).patches]
    assert max(sizes) > 2 * min(sizes)


def test_one_patch_is_the_whole_sphere(pde):
    problem = pde.build(level=2, patches=1)
    run = pde.solve_sphere(ThreadPoolExecutor, problem, sweeps=1, workers=1)
    torch.testing.assert_close(run.solution, torch.linalg.solve(problem.matrix.to_dense(), problem.load))


def test_sweeps_converge_to_the_direct_solution(pde):
    problem = pde.build(level=3, patches=12)
    direct = torch.linalg.solve(problem.matrix.to_dense(), problem.load)
    errors = [
        float((pde.solve_sphere(ThreadPoolExecutor, problem, sweeps, workers=2).solution - direct).abs().max())
        for sweeps in (0, 3, 6, 9)
    ]
    # A factor of 3 for each sweep, at the least.
    assert all(after < before / 27 for before, after in itertools.pairwise(errors)), errors


@pytest.mark.parametrize("executor", [ThreadPoolExecutor, GPUPoolExecutor])
def test_error_falls_with_the_square_of_the_edge(pde, executor):
    errors = []
    for level, patches in ((3, 8), (4, 16)):
        problem = pde.build(level, patches)
        run = pde.solve_sphere(executor, problem, workers=2)
        errors.append(pde.relative_l2_error(problem, run.solution))
        assert sum(load.tasks for load in run.loads.values()) == 6 * patches
    assert errors[1] < 6e-3
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.15)


def test_executors_agree(pde):
    problem = pde.build(level=3, patches=12)
    threads, pool = (
        pde.solve_sphere(executor, problem, workers=3).solution for executor in (ThreadPoolExecutor, GPUPoolExecutor)
    )
    torch.testing.assert_close(pool, threads, rtol=pde.AGREEMENT, atol=pde.AGREEMENT)


def run_program(*options, simulated=""):
    return run_example("pde_solve", "--level", "3", "--patches", "12", *options, simulated=simulated)


def table(output, executor):
    """Return device -> (tasks, peak bytes) as the program printed them for one executor."""
    block = output.split(f"{executor}: ")[1].split("\n\n")[0]
    rows = re.findall(r"^  (\S+) +(\d+) +[\d.]+  ([\d,]+)", block, re.MULTILINE)
    return {device: (int(tasks), int(peak.replace(",", ""))) for device, tasks, peak in rows}


def test_program_prints_both_runs():
    done = run_program()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "642 vertices, 1280 triangles" in done.stdout
    for executor in ("ThreadPoolExecutor", "GPUPoolExecutor"):
        assert sum(tasks for tasks, _ in table(done.stdout, executor).values()) == 6 * 12
    assert "largest difference between the two" in done.stdout


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
def test_program_uses_every_simulated_device():
    done = run_program("--sim", "4x64MiB")
    assert done.returncode == 0, done.stderr
    threads, pool = (table(done.stdout, executor) for executor in ("ThreadPoolExecutor", "GPUPoolExecutor"))
    assert threads.keys() == {"sim:0"}
    assert pool.keys() == {f"sim:{index}" for index in range(4)}
    assert sum(tasks for tasks, _ in pool.values()) == 6 * 12
    for _, peak_bytes in pool.values():
        assert 0 < peak_bytes <= 64 * 2**20
    assert "largest difference between the two" in done.stdout


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
def test_program_fails_where_no_device_holds_a_patch():
    done = run_program("--sim", "2x64KiB")
    assert done.returncode == 1
    assert "ThreadPoolExecutor: out of memory" in done.stdout
    assert "relative L2 error" not in done.stdout
    assert "DeviceMemoryError" in done.stderr


@pytest.mark.parametrize("options", [("--level", "0"), ("--patches", "0"), ("--patches", "1000")])
def test_program_refuses_bad_sizes(options):
    done = run_program(*options)
    assert done.returncode == 2
    assert "--level must be at least 1" in done.stderr


@pytest.mark.parametrize("devices", ["4", "x1GiB", "4xbig"])
def test_program_refuses_bad_devices(devices):
    done = run_program("--sim", devices)
    assert done.returncode == 2
    assert "--sim takes NxSIZE" in done.stderr


def test_program_refuses_a_bad_environment_before_it_computes():
    done = run_program(simulated="four")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "MANAGED_EXEC_SIM: expected devices and the memory of each, like '4x1GiB', got 'four'" in done.stderr


@pytest.mark.timeout(400)  # the first use of the simulator compiles it
def test_option_goes_before_the_environment():
    done = run_program("--sim", "2x64MiB", simulated="four")
    assert done.returncode == 0, done.stderr
    assert table(done.stdout, "GPUPoolExecutor").keys() == {"sim:0", "sim:1"}
