"""Weighted least squares for a handful of columns, in pure Python. Floats: never for what ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, sqrt
from typing import NamedTuple

Column = Sequence[float]


class Solution(NamedTuple):
    """coefficients and their standard errors; predicted values and their standard errors, point by point."""

    coefficients: list[float]
    coefficient_stderrs: list[float]
    predicted: list[float]
    stderrs: list[float]


def solve(columns: Sequence[Column], values: Sequence[float], weights: Sequence[float]) -> Solution:
    """The coefficients that make the sum of (weight x error)^2 least.

    There are more points than columns, and the columns are independent (`condition`); ZeroDivisionError otherwise.
    """
    # Orthogonal columns (modified Gram-Schmidt): no normal equations, whose condition is the square of the columns'.
    basis: list[list[float]] = []
    triangle: list[list[float]] = []  # the k-th: how much of each basis vector is in the k-th column
    for plain in columns:
        column = [x * w for x, w in zip(plain, weights, strict=True)]
        parts = []
        for direction in basis:
            part = dot(direction, column)
            column = [x - part * d for x, d in zip(column, direction, strict=True)]
            parts.append(part)
        length = sqrt(dot(column, column))
        basis.append([x / length for x in column])
        triangle.append([*parts, length])
    target = [y * w for y, w in zip(values, weights, strict=True)]
    inverse = _inverse(triangle)
    along = [dot(direction, target) for direction in basis]
    coefficients = [dot(row, along) for row in inverse]
    predicted = [dot(coefficients, point) for point in zip(*columns, strict=True)]
    squares = sum(((y - p) * w) ** 2 for y, p, w in zip(values, predicted, weights, strict=True))
    sigma = sqrt(squares / (len(values) - len(columns)))
    return Solution(
        coefficients,
        [sigma * hypot(*row) for row in inverse],
        predicted,
        [sigma * hypot(*parts) / w for parts, w in zip(zip(*basis, strict=True), weights, strict=True)],
    )


def dot(left: Column, right: Column) -> float:
    """The scalar product."""
    return sum(x * y for x, y in zip(left, right, strict=True))


def _inverse(triangle: Sequence[Sequence[float]]) -> list[list[float]]:
    """The rows of the inverse of an upper triangular matrix, which is given by its columns."""
    size = len(triangle)
    rows = [[0.0] * size for _ in range(size)]
    for k in range(size):
        rows[k][k] = 1 / triangle[k][k]
        for i in reversed(range(k)):
            rows[i][k] = -sum(triangle[j][i] * rows[j][k] for j in range(i + 1, k + 1)) / triangle[i][i]
    return rows


def condition(columns: Sequence[Column]) -> float:
    """The condition number of the columns, each scaled to length 1; infinite where they are dependent.

    From the eigenvalues of the scalar products, so nothing above 1e7 is told apart.
    """
    lengths = [sqrt(dot(column, column)) for column in columns]
    if not all(lengths):
        return inf
    products = [
        [dot(left, right) / m / n for right, n in zip(columns, lengths, strict=True)]
        for left, m in zip(columns, lengths, strict=True)
    ]
    values = _eigenvalues(products)
    smallest, largest = min(values), max(values)
    return sqrt(largest / smallest) if smallest > largest * 1e-14 else inf


def _eigenvalues(matrix: list[list[float]]) -> list[float]:
    """Of a small symmetric matrix, which is used up: Jacobi's rotations."""
    size = len(matrix)
    for _ in range(12):  # they converge quadratically; four columns need five or six sweeps
        for p in range(size):
            for q in range(p + 1, size):
                if not matrix[p][q]:
                    continue
                ratio = (matrix[q][q] - matrix[p][p]) / (2 * matrix[p][q])
                tangent = (1 if ratio >= 0 else -1) / (abs(ratio) + hypot(ratio, 1))
                cosine = 1 / hypot(tangent, 1)
                sine = tangent * cosine
                for row in matrix:
                    row[p], row[q] = cosine * row[p] - sine * row[q], sine * row[p] + cosine * row[q]
                for k in range(size):
                    x, y = matrix[p][k], matrix[q][k]
                    matrix[p][k], matrix[q][k] = cosine * x - sine * y, sine * x + cosine * y
    return [matrix[k][k] for k in range(size)]
