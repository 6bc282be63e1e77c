"""What the operations compute, in NumPy. For a loss L, `dx` stands for dL/dx, an array as large as x."""

import math

import numpy as np

GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
LAYER_NORM_EPS = 1e-5


def to_device(array):
    return array


def to_host(x):
    return x


def zeros(*shape):
    return np.zeros(shape, np.float32)


def reshape(x, shape):
    return x.reshape(shape)


def transpose(x, axes):
    return x.transpose(axes)


def turned(x):
    """The last two dims of x exchanged."""
    return x.swapaxes(-1, -2)


def rows(x):
    """[.., C] -> [R, C]"""
    return x.reshape(-1, x.shape[-1])


def add(a, b):
    return a + b


def add_backward(dc, a, b):
    return dc, dc.reshape(-1, *b.shape).sum(0)


def matmul(a, b):
    return a @ b


def matmul_backward(dc, a, b):
    """da = dc b^T, db = a^T dc"""
    if b.ndim == 2:  # a weight: all rows of a met it, so they make one product
        return (rows(dc) @ b.T).reshape(a.shape), rows(a).T @ rows(dc)
    return dc @ turned(b), turned(a) @ dc


def gather(table, indices):
    return table[indices]


def gather_backward(dy, table, indices):
    dtable = np.zeros_like(table)
    np.add.at(dtable, indices, dy)  # not `dtable[indices] += dy`, which counts a word that occurs twice once
    return dtable


def gelu(x):
    return 0.5 * x * (1 + np.tanh(GELU_SLOPE * (x + GELU_CUBE * x * x * x)))


def gelu_backward(dy, x):
    tanh = np.tanh(GELU_SLOPE * (x + GELU_CUBE * x * x * x))
    slope = GELU_SLOPE * (1 + 3 * GELU_CUBE * x * x)
    return dy * 0.5 * (1 + tanh + x * (1 - tanh * tanh) * slope)


def layer_norm(x, gain, bias):
    """Returns also what the way back needs: x with mean 0 and variance 1, and 1 / its standard deviation."""
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    normed = centered * rstd
    return normed * gain + bias, normed, rstd


def layer_norm_backward(dy, gain, normed, rstd):
    """x moves its row's mean and variance, too: what dy has along these two is taken out."""
    dnormed = dy * gain
    along_mean = dnormed.mean(-1, keepdims=True)
    along_normed = (dnormed * normed).mean(-1, keepdims=True)
    dx = rstd * (dnormed - along_mean - normed * along_normed)
    return dx, rows(dy * normed).sum(0), rows(dy).sum(0)


def causal_softmax(x, scale):
    """Row i of [.., T, T] scores: weights over the words 0 to i, which add up to 1."""
    later = np.triu(np.full(x.shape[-2:], -np.inf, x.dtype), 1)
    y = x * scale
    y += later
    y -= y.max(-1, keepdims=True)  # exp of a large score would overflow
    np.exp(y, out=y)
    y /= y.sum(-1, keepdims=True)
    return y


def causal_softmax_backward(dy, y, scale):
    dx = dy * y
    dx -= y * dx.sum(-1, keepdims=True)
    dx *= scale
    return dx


def cross_entropy(logits, targets):
    """-log of what the model gave to the word that came, mean over all rows; and the probabilities [.., V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    probabilities = np.exp(shifted)
    total = probabilities.sum(-1, keepdims=True)
    probabilities /= total
    right = np.take_along_axis(shifted, targets[..., None], -1)
    return (np.log(total) - right).mean(keepdims=True).reshape(1), probabilities  # the log of a probability may be -inf


def cross_entropy_backward(probabilities, targets):
    dlogits = probabilities.copy()
    rows(dlogits)[np.arange(targets.size), targets.ravel()] -= 1
    dlogits /= targets.size
    return dlogits


def adam(w, dw, m, v, step_size, beta1, beta2, eps):
    """In place. step_size and eps come with the corrections for m and v that start at 0: see adam.py."""
    m *= beta1
    m += (1 - beta1) * dw
    v *= beta2
    v += (1 - beta2) * dw * dw
    w -= step_size * m / (np.sqrt(v) + eps)
