"""Corruptions one pixel at a time, or by another library: slow, obvious and independent.

Pictures are arrays (H, W, C) of float64 in [0, 1], except where 8-bit layers are said.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

import numpy as np
from scipy import ndimage

Picture = np.ndarray


def clamp(i: int, size: int) -> int:
    return min(max(i, 0), size - 1)


def mirror(i: int, size: int) -> int:
    """dcb|abcd|cba: the border pixel is not repeated."""
    while not 0 <= i < size:
        i = -i if i < 0 else 2 * (size - 1) - i
    return i


def reflect(i: int, size: int) -> int:
    """dcba|abcd|dcba: the border pixel is repeated."""
    while not 0 <= i < size:
        i = -1 - i if i < 0 else 2 * size - 1 - i
    return i


def gaussian(x: Picture, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Picture:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode=mode, truncate=truncate)


def clipped_zoom(x: Picture, factor: float) -> Picture:
    """Enlarge the middle with scipy, then cut off what sticks out."""
    size = len(x)
    kept = math.ceil(size / factor)
    first = (size - kept) // 2
    middle = x[first : first + kept, first : first + kept]
    large = ndimage.zoom(middle, (factor, factor, 1), order=1)
    trim = (len(large) - size) // 2
    return large[trim : trim + size, trim : trim + size]


def motion(x: Picture, radius: float, sigma: float, degrees: float) -> Picture:
    height, width, _ = x.shape
    count = 2 * math.ceil(radius) + 1
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(count)]
    out = np.zeros_like(x)
    for row in range(height):
        for column in range(width):
            for i, weight in enumerate(weights):
                down = math.ceil(i * math.sin(math.radians(degrees)) - 0.5)
                right = math.ceil(i * math.cos(math.radians(degrees)) - 0.5)
                source = x[clamp(row + down, height), clamp(column + right, width)]
                out[row, column] += weight / sum(weights) * source
    return out


def disk_blur(x: Picture, radius: float, soft: float) -> Picture:
    """Correlation with a disk whose values were averaged with their 8 (or 24) neighbours."""
    reach, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    inside = {
        (i, j): 1.0
        for i in range(-reach, reach + 1)
        for j in range(-reach, reach + 1)
        if i**2 + j**2 <= radius**2
    }
    bell = {i: math.exp(-(i**2) / (2 * soft**2)) for i in range(-taps, taps + 1)}
    total = sum(bell.values()) ** 2 * len(inside)
    side = 2 * reach + 1
    kernel = {
        (i, j): sum(
            bell[u]
            * bell[v]
            * inside.get(
                (mirror(i + u + reach, side) - reach, mirror(j + v + reach, side) - reach), 0
            )
            for u in bell
            for v in bell
        )
        / total
        for i in range(-reach, reach + 1)
        for j in range(-reach, reach + 1)
    }
    height, width, _ = x.shape
    out = np.zeros_like(x)
    for row in range(height):
        for column in range(width):
            for (i, j), weight in kernel.items():
                if weight:
                    source = x[mirror(row + i, height), mirror(column + j, width)]
                    out[row, column] += weight * source
    return out


def glass(x: Picture, rng: np.random.Generator, sigma: float, reach: int, passes: int) -> Picture:
    out = np.floor(gaussian(x, sigma) * 255 + 1e-6) / 255
    height, width, _ = x.shape
    rows, columns = range(height - reach, reach, -1), range(width - reach, reach, -1)
    for _ in range(passes):
        dx, dy = rng.integers(-reach, reach, size=(2, len(rows) * len(columns)))
        visit = 0
        for row in rows:
            for column in columns:
                out[row, column] = out[row + dy[visit], column + dx[visit]]
                visit += 1
    return gaussian(out, sigma)


def hsv(x: Picture, change) -> Picture:
    """Apply ``change`` (h, s, v) → (h, s, v) to each pixel by the standard library."""
    out = np.empty_like(x)
    for place in np.ndindex(x.shape[:2]):
        out[place] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*x[place])))
    return out


def plasma(size: int, decay: float, rng: np.random.Generator) -> Picture:
    """Diamond-square on a torus, point by point; draws in the order centres, across, down."""
    grid = {(0, 0): 0.0}
    step, amplitude = size, 10_000.0

    def fill(points: Sequence[tuple[int, int]], neighbours: Sequence[tuple[int, int]]) -> None:
        noise = rng.uniform(-amplitude, amplitude, len(points))
        for (row, column), jitter in zip(points, noise, strict=True):
            around = [grid[(row + i) % size, (column + j) % size] for i, j in neighbours]
            grid[row, column] = sum(around) / 4 + jitter

    while step > 1:
        half = step // 2
        whole, middle = range(0, size, step), range(half, size, step)
        corners = [(-half, -half), (-half, half), (half, -half), (half, half)]
        cross = [(-half, 0), (half, 0), (0, -half), (0, half)]
        fill([(i, j) for i in middle for j in middle], corners)
        fill([(i, j) for i in whole for j in middle], cross)
        fill([(i, j) for i in middle for j in whole], cross)
        step, amplitude = half, amplitude / decay**2
    values = np.array([[grid[i, j] for j in range(size)] for i in range(size)])
    return (values - values.min()) / (values.max() - values.min())


def bilinear(x: Picture, row: float, column: float, border) -> np.ndarray:
    height, width, _ = x.shape
    top, left = math.floor(row), math.floor(column)
    total = np.zeros(x.shape[2])
    for i, a in ((top, 1 - (row - top)), (top + 1, row - top)):
        for j, b in ((left, 1 - (column - left)), (left + 1, column - left)):
            total += a * b * x[border(i, height), border(j, width)]
    return total


def elastic(
    x: Picture, rng: np.random.Generator, strength: float, sigma: float, shift: float
) -> Picture:
    height, width, _ = x.shape
    arm = min(height, width) // 3
    before = [(height // 2 + i * arm, width // 2 + j * arm) for i, j in ((1, 1), (-1, 1), (-1, -1))]
    after = before + rng.uniform(-shift, shift, size=(3, 2))
    # The inverse map a·row + b·column + c for each coordinate, from three pairs of points.
    equations = np.array([[row, column, 1] for row, column in after])
    to_row = np.linalg.solve(equations, [row for row, _ in before])
    to_column = np.linalg.solve(equations, [column for _, column in before])
    moved = np.empty_like(x)
    for row, column in np.ndindex(height, width):
        here = np.array([row, column, 1])
        moved[row, column] = bilinear(x, to_row @ here, to_column @ here, mirror)
    noise = rng.uniform(-1, 1, size=(2, height, width))
    down, right = (
        strength * ndimage.gaussian_filter(part, sigma, mode="reflect", truncate=3.0)
        for part in noise
    )
    out = np.empty_like(x)
    for row, column in np.ndindex(height, width):
        place = (row + down[row, column], column + right[row, column])
        out[row, column] = bilinear(moved, *place, reflect)
    return out


def edges(layer: np.ndarray, low: float, high: float) -> np.ndarray:
    """Canny on an 8-bit layer: loops and a flood fill."""
    height, width = layer.shape

    def value(i: int, j: int) -> int:
        return int(layer[clamp(i, height), clamp(j, width)])

    gradient, size = {}, {}
    for i, j in np.ndindex(height, width):
        dx = sum(
            w * (value(i + k, j + 1) - value(i + k, j - 1)) for k, w in ((-1, 1), (0, 2), (1, 1))
        )
        dy = sum(
            w * (value(i + 1, j + k) - value(i - 1, j + k)) for k, w in ((-1, 1), (0, 2), (1, 1))
        )
        gradient[i, j], size[i, j] = (dx, dy), abs(dx) + abs(dy)

    def is_ridge(i: int, j: int) -> bool:
        dx, dy = gradient[i, j]
        degrees = math.degrees(math.atan2(abs(dy), abs(dx)))
        if degrees < 22.5:
            step, strict = (0, 1), False
        elif degrees > 67.5:
            step, strict = (1, 0), False
        else:
            step, strict = ((1, 1) if (dx < 0) == (dy < 0) else (1, -1)), True
        here = size[i, j]
        first = size.get((i - step[0], j - step[1]), 0)
        second = size.get((i + step[0], j + step[1]), 0)
        return here > first and (here > second if strict else here >= second)

    weak = {p for p in size if size[p] > low and is_ridge(*p)}
    found = np.zeros(layer.shape, dtype=bool)
    todo = [p for p in weak if size[p] > high]
    while todo:
        p = todo.pop()
        if p in weak and not found[p]:
            found[p] = True
            todo.extend((p[0] + i, p[1] + j) for i in (-1, 0, 1) for j in (-1, 0, 1))
    return found


def equalise(layer: np.ndarray) -> np.ndarray:
    """A level becomes 255 × the share of the pixels above the lowest level that are up to it."""
    lowest = layer.min()
    above = layer[layer > lowest]
    if not len(above):
        return layer
    share = np.vectorize(lambda v: (above <= v).sum() / len(above))(layer)
    return np.rint(255 * share).astype(np.uint8)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]
