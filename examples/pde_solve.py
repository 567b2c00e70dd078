"""Solve a partial differential equation on a sphere, patch by patch, first in threads, then on every GPU.

    python examples/pde_solve.py                      # the machine's GPUs, or its CPU
    python examples/pde_solve.py --sim 4x256MiB       # four simulated devices
    python examples/pde_solve.py --sim 4x64MiB        # too little for four tasks on one device
    python examples/pde_solve.py --level 6 --patches 64

The equation is u - Laplace(u) = f on the unit sphere, discretised with linear finite elements on a subdivided
icosahedron (the stiffness matrix is the cotangent Laplacian). The right-hand side is chosen so that u is a spherical
harmonic, which gives the error of the result.

The sphere is cut into overlapping patches of very different sizes. A sweep solves a dense system on every patch for
what is still wrong there, each in a task, and then repairs on a coarse sphere what patches cannot see from within
(two-level restricted additive Schwarz). A handful of sweeps reach the error of the discretisation.

`solve_sphere` runs twice. All that differs is the class that it is given: ThreadPoolExecutor, whose threads all use the
current accelerator's first device, and GPUPoolExecutor, which gives each task a device.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from options import parsed
from torch import Tensor

from managed_exec import GPUPoolExecutor

DEGREE = 3
EIGENVALUE = DEGREE * (DEGREE + 1)
COARSE_LEVEL = 2
# The two runs do the same arithmetic; another device's BLAS may round otherwise.
AGREEMENT = 1e-10


# The sphere: vertices [V, 3] on the unit sphere, triangles [F, 3], V = 10 * 4**level + 2.


@dataclass(frozen=True)
class Sphere:
    vertices: Tensor
    triangles: Tensor


def icosahedron() -> Sphere:
    golden = (1 + 5**0.5) / 2
    corners = [(0.0, a, b) for a in (-1, 1) for b in (-golden, golden)]
    vertices = torch.tensor(
        [(x, y, z) for x, y, z in corners] + [(y, z, x) for x, y, z in corners] + [(z, x, y) for x, y, z in corners],
        dtype=torch.float64,
    )
    near = torch.cdist(vertices, vertices) < 2.1  # edges have length 2
    triples = torch.combinations(torch.arange(12), 3)
    i, j, k = triples.unbind(1)
    return Sphere(torch.nn.functional.normalize(vertices), triples[near[i, j] & near[j, k] & near[k, i]])


def subdivide(sphere: Sphere) -> tuple[Sphere, Tensor]:
    """Cut every triangle in four. Also returns the two old vertices that each new one lies between, [E, 2]."""
    corners = sphere.triangles
    sides = corners[:, [1, 2, 2, 0, 0, 1]].view(-1, 2).sort(dim=1).values  # side c lies opposite corner c
    edges, edge_of_side = sides.unique(dim=0, return_inverse=True)
    midpoints = torch.nn.functional.normalize(sphere.vertices[edges].mean(dim=1))
    a, b, c = corners.unbind(1)
    opposite_a, opposite_b, opposite_c = (edge_of_side.view(-1, 3) + len(sphere.vertices)).unbind(1)
    quarters = (
        (a, opposite_c, opposite_b),
        (opposite_c, b, opposite_a),
        (opposite_b, opposite_a, c),
        (opposite_a, opposite_b, opposite_c),
    )
    triangles = torch.cat([torch.stack(quarter, dim=1) for quarter in quarters])
    return Sphere(torch.cat([sphere.vertices, midpoints]), triangles), edges


def assemble(sphere: Sphere) -> tuple[Tensor, Tensor]:
    """Return the matrices of `u - Laplace(u)` and of `u` (mass), both sparse [V, V]."""
    corners = sphere.vertices[sphere.triangles]
    sides = corners.roll(1, dims=1) - corners.roll(-1, dims=1)
    area = torch.linalg.cross(sides[:, 0], sides[:, 1]).norm(dim=1).view(-1, 1, 1) / 2
    # sides_i . sides_j / (4 area) is minus half the cotangent of the angle between the two sides.
    stiffness = sides @ sides.mT / (4 * area)
    mass = area / 12 * (1 + torch.eye(3, dtype=torch.float64))
    rows = sphere.triangles.unsqueeze(2).expand(-1, 3, 3).flatten()
    columns = sphere.triangles.unsqueeze(1).expand(-1, 3, 3).flatten()

    def matrix(entries: Tensor) -> Tensor:
        size = (len(sphere.vertices), len(sphere.vertices))
        indices = torch.stack([rows, columns])
        return torch.sparse_coo_tensor(indices, entries.flatten(), size, check_invariants=True).coalesce()

    return matrix(stiffness + mass), matrix(mass)


def harmonic(vertices: Tensor) -> Tensor:
    """Evaluate the real spherical harmonic of degree 3 and order 2 (normalised on the unit sphere)."""
    x, y, z = vertices.unbind(1)
    return (105 / torch.pi) ** 0.5 / 4 * (x**2 - y**2) * z


# The patches


@dataclass(frozen=True)
class Patch:
    vertices: Tensor  # [n]: first the `owned` ones, then the overlap with other patches
    owned: int
    matrix: Tensor  # sparse [n, n]


def owners(matrix: Tensor, patches: int, seed: int) -> Tensor:
    """Grow patches from random vertices, ring by ring, until every vertex has one owner, [V]."""
    source, neighbour = matrix.indices()
    owner = torch.full((matrix.shape[0],), -1)
    seeds = torch.randperm(len(owner), generator=torch.Generator().manual_seed(seed))[:patches]
    owner[seeds] = torch.arange(patches)
    while (owner < 0).any():
        reached = torch.full_like(owner, -1).scatter_reduce(0, neighbour, owner[source], "amax")
        owner = torch.where(owner < 0, reached, owner)
    return owner


def cut(matrix: Tensor, owner: Tensor, overlap: int) -> list[Patch]:
    """Cut the matrix into one block a patch, each patch reaching `overlap` rings into its neighbours."""
    source, neighbour = matrix.indices()
    local = torch.empty_like(owner)
    patches = []
    for number in range(int(owner.max()) + 1):
        own = owner == number
        inside = own
        for _ in range(overlap):
            inside = inside.index_fill(0, neighbour[inside[source]], True)
        vertices = torch.cat([own.nonzero(), (inside & ~own).nonzero()]).flatten()
        local[vertices] = torch.arange(len(vertices))
        kept = inside[source] & inside[neighbour]
        indices = torch.stack([local[source[kept]], local[neighbour[kept]]])
        size = (len(vertices), len(vertices))
        block = torch.sparse_coo_tensor(indices, matrix.values()[kept], size, check_invariants=True)
        patches.append(Patch(vertices, int(own.sum()), block))
    return patches


# The coarse sphere, whose vertices are the first ones of the fine sphere


@dataclass(frozen=True)
class Coarse:
    matrix: Tensor  # dense
    edges: list[Tensor]  # per subdivision, see `subdivide`

    def correct(self, residual: Tensor) -> Tensor:
        """Solve for the smooth part of the error."""
        for edges in reversed(self.edges):
            kept, halves = residual.split([len(residual) - len(edges), len(edges)])
            residual = kept.index_add(0, edges.flatten(), (halves / 2).repeat_interleave(2))
        correction = torch.linalg.solve(self.matrix, residual)
        for edges in self.edges:
            correction = torch.cat([correction, correction[edges].mean(dim=1)])
        return correction


@dataclass(frozen=True)
class Problem:
    sphere: Sphere
    matrix: Tensor
    mass: Tensor
    load: Tensor
    exact: Tensor
    coarse: Coarse
    patches: list[Patch]


def build(level: int, patches: int, overlap: int = 5, seed: int = 0) -> Problem:
    sphere = icosahedron()
    coarse_level = min(COARSE_LEVEL, level - 1)
    edges = []
    for done in range(level):
        if done == coarse_level:
            coarse_sphere = sphere
        sphere, new_edges = subdivide(sphere)
        edges.append(new_edges)
    coarse = Coarse(assemble(coarse_sphere)[0].to_dense(), edges[coarse_level:])
    matrix, mass = assemble(sphere)
    exact = harmonic(sphere.vertices)
    load = mass @ ((1 + EIGENVALUE) * exact)
    return Problem(sphere, matrix, mass, load, exact, coarse, cut(matrix, owners(matrix, patches, seed), overlap))


# The task, and the program that submits it


@dataclass(frozen=True)
class Solved:
    correction: Tensor
    device: torch.device
    seconds: float


def solve_patch(patch: Patch, residual: Tensor) -> Solved:
    """Solve for the error on one patch, on the device of this thread."""
    start = time.perf_counter()
    # Without an index ("cuda"): a thread's own device, the first one in a plain thread, the task's in a task.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    matrix = patch.matrix.to_dense().to(device)
    correction = torch.linalg.solve(matrix, residual.to(device))[: patch.owned]
    return Solved(correction.cpu(), matrix.device, time.perf_counter() - start)


@dataclass
class Load:
    tasks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    solution: Tensor
    seconds: float
    loads: dict[torch.device, Load]


def solve_sphere(
    executor: type[ThreadPoolExecutor], problem: Problem, sweeps: int = 6, workers: int | None = None
) -> Run:
    start = time.perf_counter()
    loads: dict[torch.device, Load] = defaultdict(Load)
    solution = problem.coarse.correct(problem.load)
    with executor(workers) as pool:
        for _ in range(sweeps):
            residual = problem.load - problem.matrix @ solution
            futures = [pool.submit(solve_patch, patch, residual[patch.vertices]) for patch in problem.patches]
            for patch, future in zip(problem.patches, futures, strict=True):
                solved = future.result()
                solution[patch.vertices[: patch.owned]] += solved.correction
                loads[solved.device].tasks += 1
                loads[solved.device].seconds += solved.seconds
            solution += problem.coarse.correct(problem.load - problem.matrix @ solution)
    return Run(solution, time.perf_counter() - start, dict(loads))


def relative_l2_error(problem: Problem, solution: Tensor) -> float:
    """Return the norm of the error over that of the exact solution, both integrated over the sphere."""
    error = solution - problem.exact
    squares = (error @ (problem.mass @ error)) / (problem.exact @ (problem.mass @ problem.exact))
    return float(squares.sqrt())


# The report


def reset_peaks() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)


def peak(device: torch.device) -> str:
    """Return the most bytes that tensors took on a device since `reset_peaks`, as text."""
    if device.type == "cpu":  # nobody counts a CPU's tensors: the largest resident size this process ever had
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024:,} (process)"
    return f"{torch.accelerator.max_memory_allocated(device):,}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Solve u - Laplace(u) = f on a sphere in overlapping patches.")
    parser.add_argument("--level", type=int, default=5, help="subdivisions of the icosahedron (%(default)s)")
    parser.add_argument("--patches", type=int, default=24, help="tasks in a sweep (%(default)s)")
    parser.add_argument("--sweeps", type=int, default=6, help="rounds of tasks (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="threads of either executor (%(default)s)")
    options = parsed(parser, arguments, "4x256MiB")
    if options.level < 1 or not 1 <= options.patches <= 10 * 4**options.level + 2:
        parser.error("--level must be at least 1, --patches between 1 and the number of vertices")
    torch.set_num_threads(1)  # tasks run side by side already

    problem = build(options.level, options.patches)
    sizes = [len(patch.vertices) for patch in problem.patches]
    print(f"{len(problem.exact)} vertices, {len(problem.sphere.triangles)} triangles")
    print(f"{len(sizes)} patches of {min(sizes)} to {max(sizes)} vertices, {options.sweeps} sweeps\n")

    runs = {}
    for executor in (ThreadPoolExecutor, GPUPoolExecutor):
        reset_peaks()
        try:
            runs[executor] = solve_sphere(executor, problem, options.sweeps, options.workers)
        except torch.OutOfMemoryError as failure:
            if executor is GPUPoolExecutor:
                raise
            print(f"{executor.__name__}: out of memory: {str(failure).splitlines()[0]}\n")
        if executor not in runs:
            gc.collect()  # a failed task's frames, and so its tensors, hang on its exception in a cycle of references
            continue
        run = runs[executor]
        error = relative_l2_error(problem, run.solution)
        print(f"{executor.__name__}: {run.seconds:.1f} s, relative L2 error {error:.2e}")
        print(f"  {'device':8} {'tasks':>5} {'task seconds':>12}  peak bytes")
        for device, load in sorted(run.loads.items(), key=lambda item: item[0].index or 0):
            print(f"  {device!s:8} {load.tasks:5} {load.seconds:12.1f}  {peak(device)}")
        print()

    if len(runs) == 2:
        threads, pool = (run.solution for run in runs.values())
        torch.testing.assert_close(pool, threads, rtol=AGREEMENT, atol=AGREEMENT)
        print(f"largest difference between the two: {(pool - threads).abs().max():.1e}")


if __name__ == "__main__":
    main()
