"""The kernels of stage 2: what one thread of a GPU does, for each operation of a GPT, forward and backward.

gpu.py starts them, as `gelu[blocks, threads](x, y)`. Three shapes of work are enough for all of them:
- number by number (GELU, add, transpose, embedding, Adam): thread i takes the numbers i, i + all threads, ...
- row by row (softmax, layer norm, cross-entropy): a block takes a row, and its threads add up what they hold in a tree
- tile by tile (matrix product, sum of rows): a block takes a square of the result

Letters: R rows, C columns. Constants are fp32 throughout: a plain 0.5 or 1 would turn the arithmetic to fp64.
Shared memory is `shared.array(0, ..)`, of the size that gpu.py asks for. With a size written here, the simulator may
give two threads of a block an array each.
"""

import math

import numpy as np
from numba import config, cuda, float32

#: A row's block has THREADS threads, a tile's TILE x TILE. In the simulator each of them is a thread of Python.
THREADS, TILE = (4, 4) if config.ENABLE_CUDASIM else (128, 16)
ZERO, HALF, ONE, THREE = np.float32([0, 0.5, 1, 3])
GELU_SLOPE, GELU_CUBE = np.float32([math.sqrt(2 / math.pi), 0.044715])
LAYER_NORM_EPS = np.float32(1e-5)


# Number by number: all arrays are flat.


@cuda.jit
def fill(x, value):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = value


@cuda.jit
def add(a, b, c):
    """c = a + b, where b repeats: it lacks leading dims of a."""
    for i in range(cuda.grid(1), c.size, cuda.gridsize(1)):
        c[i] = a[i] + b[i % b.size]


@cuda.jit
def transpose(x, y, shape, strides):
    """y, of this shape: a step along its dim d is a step of strides[d] in x."""
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        rest, place = i, 0
        for dim in range(len(shape) - 1, -1, -1):
            place += rest % shape[dim] * strides[dim]
            rest //= shape[dim]
        y[i] = x[place]


@cuda.jit
def gelu(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        tanh = math.tanh(GELU_SLOPE * (x[i] + GELU_CUBE * x[i] * x[i] * x[i]))
        y[i] = HALF * x[i] * (ONE + tanh)


@cuda.jit
def gelu_backward(dy, x, dx):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        tanh = math.tanh(GELU_SLOPE * (x[i] + GELU_CUBE * x[i] * x[i] * x[i]))
        slope = GELU_SLOPE * (ONE + THREE * GELU_CUBE * x[i] * x[i])
        dx[i] = dy[i] * HALF * (ONE + tanh + x[i] * (ONE - tanh * tanh) * slope)


@cuda.jit
def gather(table, indices, y, width):
    """Row r of y is the row of the table that indices[r] names."""
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = table[indices[i // width] * width + i % width]


@cuda.jit
def scatter_add(dy, indices, dtable, width):
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):  # atomic: two rows of dy may belong to one word
        cuda.atomic.add(dtable, indices[i // width] * width + i % width, dy[i])


@cuda.jit
def cross_entropy_backward(probabilities, targets, dlogits, classes):
    n_rows = float32(targets.size)
    for i in range(cuda.grid(1), dlogits.size, cuda.gridsize(1)):
        wanted = ONE if targets[i // classes] == i % classes else ZERO
        dlogits[i] = (probabilities[i] - wanted) / n_rows


@cuda.jit
def adam(w, dw, m, v, step_size, beta1, beta2, eps):
    """eps and step_size come with the corrections for m and v that start at 0: see adam.py."""
    for i in range(cuda.grid(1), w.size, cuda.gridsize(1)):
        m[i] = beta1 * m[i] + (ONE - beta1) * dw[i]
        v[i] = beta2 * v[i] + (ONE - beta2) * dw[i] * dw[i]
        w[i] -= step_size * m[i] / (math.sqrt(v[i]) + eps)


# Row by row: block r has row r, and its thread t the columns t, t + THREADS, ...


@cuda.jit(device=True)
def tree(cells, mine, want_largest):
    """The sum, or the largest, of one number of each thread, in log2(THREADS) steps. All threads get it."""
    t, half = cuda.threadIdx.x, THREADS // 2
    cells[t] = mine
    while half > 0:
        cuda.syncthreads()  # thread t reads what thread t + half wrote
        if t < half:
            other = cells[t + half]
            cells[t] = max(cells[t], other) if want_largest else cells[t] + other
        half //= 2
    cuda.syncthreads()
    result = cells[0]
    cuda.syncthreads()  # nobody uses the cells again before all have read the result
    return result


@cuda.jit
def causal_softmax(x, y, scale):
    """y = softmax(scale x) over the keys that a query sees. Row: a query. A square of C rows is one head."""
    cells = cuda.shared.array(0, float32)
    row, t, n_columns = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    n_seen = row % n_columns + 1  # its own place in the text, and those before
    largest = float32(-math.inf)
    for j in range(t, n_seen, THREADS):
        largest = max(largest, x[row, j])
    largest = tree(cells, largest, True)
    total = ZERO
    for j in range(t, n_seen, THREADS):
        y[row, j] = math.exp(scale * (x[row, j] - largest))
        total += y[row, j]
    total = tree(cells, total, False)
    for j in range(t, n_columns, THREADS):
        y[row, j] = y[row, j] / total if j < n_seen else ZERO


@cuda.jit
def causal_softmax_backward(dy, y, dx, scale):
    """dx = scale y (dy - sum(y dy)). Where y is 0, so is dx: the mask needs no line."""
    cells = cuda.shared.array(0, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = ZERO
    for j in range(t, y.shape[1], THREADS):
        total += y[row, j] * dy[row, j]
    total = tree(cells, total, False)
    for j in range(t, y.shape[1], THREADS):
        dx[row, j] = scale * y[row, j] * (dy[row, j] - total)


@cuda.jit
def layer_norm(x, gain, bias, y, normed, rstd):
    """normed = (x - mean) rstd, y = gain normed + bias. normed and rstd are kept for the backward pass."""
    cells = cuda.shared.array(0, float32)
    row, t, width = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    total = ZERO
    for j in range(t, width, THREADS):
        total += x[row, j]
    mean = tree(cells, total, False) / float32(width)
    total = ZERO
    for j in range(t, width, THREADS):
        total += (x[row, j] - mean) * (x[row, j] - mean)
    variance = tree(cells, total, False) / float32(width)
    scale = ONE / math.sqrt(variance + LAYER_NORM_EPS)
    for j in range(t, width, THREADS):
        normed[row, j] = (x[row, j] - mean) * scale
        y[row, j] = gain[j] * normed[row, j] + bias[j]
    if t == 0:
        rstd[row] = scale


@cuda.jit
def layer_norm_backward(dy, gain, normed, rstd, dx, dgain):
    """dx = rstd (g - mean(g) - normed mean(g normed)) with g = gain dy. dgain still has a row for each row of x."""
    cells = cuda.shared.array(0, float32)
    row, t, width = cuda.blockIdx.x, cuda.threadIdx.x, dy.shape[1]
    along_ones = along_normed = ZERO
    for j in range(t, width, THREADS):
        along_ones += gain[j] * dy[row, j]
        along_normed += gain[j] * dy[row, j] * normed[row, j]
    along_ones = tree(cells, along_ones, False) / float32(width)
    along_normed = tree(cells, along_normed, False) / float32(width)
    for j in range(t, width, THREADS):
        dx[row, j] = rstd[row] * (gain[j] * dy[row, j] - along_ones - normed[row, j] * along_normed)
        dgain[row, j] = dy[row, j] * normed[row, j]


@cuda.jit
def cross_entropy(logits, targets, losses, probabilities):
    """losses[r] = -log(probability of the target) / R, so that their sum is the mean."""
    cells = cuda.shared.array(0, float32)
    row, t, classes = cuda.blockIdx.x, cuda.threadIdx.x, logits.shape[1]
    largest = float32(-math.inf)
    for j in range(t, classes, THREADS):
        largest = max(largest, logits[row, j])
    largest = tree(cells, largest, True)
    total = ZERO
    for j in range(t, classes, THREADS):
        probabilities[row, j] = math.exp(logits[row, j] - largest)
        total += probabilities[row, j]
    total = tree(cells, total, False)
    for j in range(t, classes, THREADS):
        probabilities[row, j] /= total
    if t == 0:  # not the logarithm of the probability, which may be 0 in fp32
        losses[row] = (math.log(total) + largest - logits[row, targets[row]]) / float32(targets.size)


# Tile by tile: neighbours in x have neighbouring columns, so that a warp reads whole pieces of memory.


@cuda.jit
def matmul(a, b, c):
    """c = a b for each pair of matrices; [n, R, K] [n, K, C] -> [n, R, C]. A number read serves TILE threads."""
    cells = cuda.shared.array(0, float32)
    tile_a, tile_b = cells[: TILE * TILE], cells[TILE * TILE :]
    n, x, y = cuda.blockIdx.z, cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.blockIdx.x * TILE + x, cuda.blockIdx.y * TILE + y
    total = ZERO
    for start in range(0, a.shape[2], TILE):
        inside_a = row < a.shape[1] and start + x < a.shape[2]
        inside_b = start + y < b.shape[1] and column < b.shape[2]
        tile_a[y * TILE + x] = a[n, row, start + x] if inside_a else ZERO
        tile_b[y * TILE + x] = b[n, start + y, column] if inside_b else ZERO
        cuda.syncthreads()  # nobody reads before all have written
        for k in range(TILE):
            total += tile_a[y * TILE + k] * tile_b[k * TILE + x]
        cuda.syncthreads()  # nobody writes again before all have read
    if row < c.shape[1] and column < c.shape[2]:
        c[n, row, column] = total


@cuda.jit
def sum_rows(a, sums):
    """sums[column] = the sum over the rows of a. A block has TILE columns, and TILE threads for each of them."""
    cells = cuda.shared.array(0, float32)
    column, x, t = cuda.grid(1), cuda.threadIdx.x, cuda.threadIdx.y
    total = ZERO
    if column < a.shape[1]:
        for row in range(t, a.shape[0], TILE):
            total += a[row, column]
    cells[t * TILE + x] = total
    cuda.syncthreads()
    if t == 0 and column < a.shape[1]:
        for other in range(1, TILE):
            total += cells[other * TILE + x]
        sums[column] = total
