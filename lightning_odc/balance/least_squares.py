"""Three coefficients, not negative, from the sums of a least-squares problem, in plain floats.

Plain floats because the results must be equal on all processors; see Note [The same plan everywhere].
"""

from __future__ import annotations

from itertools import combinations
from math import fsum

Vector = list[float]
Matrix = list[list[float]]

_SIZE = 3
_LEAST_SHARE = 1e-3


def fit_near(products: Matrix, targets: Vector, pulls: Vector, near: Vector) -> Vector:
    """Minimise the weighted squared errors of ``rows @ x`` from 1, with ``x >= 0``, drawn to ``near``.

    Args:
        products: ``[3, 3]``, the weighted sum of ``row[i] * row[j]``.
        targets: ``[3]``, the weighted sum of ``row[i]``.
        pulls: ``[3]``, how strongly each coefficient is drawn; they decide what the rows leave open.
        near: ``[3]``, not negative.

    Returns:
        ``[3]``; what would be zero is a thousandth of ``near``.
    """
    matrix = [[products[i][j] + (pulls[i] if i == j else 0.0) for j in range(_SIZE)] for i in range(_SIZE)]
    vector = [targets[i] + pulls[i] * near[i] for i in range(_SIZE)]
    best = _not_negative(matrix, vector)
    return [max(value, _LEAST_SHARE * anchor) for value, anchor in zip(best, near, strict=True)]


def _not_negative(matrix: Matrix, vector: Vector) -> Vector:
    """The minimum of ``x @ matrix @ x / 2 - vector @ x`` over ``x >= 0``: the best over all sets of zeros."""
    best, lowest = [0.0] * _SIZE, 0.0
    for size in range(_SIZE, 0, -1):
        for free in combinations(range(_SIZE), size):
            found = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            if found is None or min(found) < 0:
                continue
            # At a minimum over the free coefficients the objective is minus half of vector @ x.
            value = -fsum(vector[i] * x for i, x in zip(free, found, strict=True))
            if value < lowest:
                lowest = value
                best = [0.0] * _SIZE
                for i, x in zip(free, found, strict=True):
                    best[i] = x
        if size == _SIZE and lowest < 0:
            break  # the minimum over all x is not negative: no need to look further
    return best


def _solve(matrix: Matrix, vector: Vector) -> Vector | None:
    """Gaussian elimination with pivoting; None if the matrix is singular to rounding."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) <= 1e-14 * abs(matrix[column][column]):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[column], strict=True)]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = fsum(rows[row][j] * solution[j] for j in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution
