"""An array that remembers how it was made. backward() plays this tape from its end, by the chain rule."""

from . import cpu

#: The module that computes. stage 2 puts gpu.py here: graph, layers and training stay as they are.
device = cpu


def use(module):
    global device
    device = module


class Tensor:
    """An array, and the operation that made it out of `parents`.

    chain(grad) takes the gradient of the loss with respect to this array. It returns one for each of the parents, or
    None where a parent needs none. A tensor without parents is a leaf: a parameter, or an input.
    """

    def __init__(self, array, parents=(), chain=None):
        self.array, self.parents, self.chain = array, parents, chain
        self.grad = None

    @property
    def shape(self):
        return self.array.shape

    def __add__(self, other):
        return add(self, other)

    def __matmul__(self, other):
        return matmul(self, other)

    def tape(self):
        """All tensors behind this one, each after its parents."""
        order, seen = [], set()

        def visit(tensor):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                for parent in tensor.parents:
                    visit(parent)
                order.append(tensor)

        visit(self)
        return order

    def backward(self, ready=lambda leaf: None):
        """Give each leaf behind this loss its gradient. ready(leaf) is called as soon as one is complete."""
        for tensor in reversed(self.tape()):  # all that used a tensor come before it here
            if not tensor.parents:
                ready(tensor)
                continue
            for parent, grad in zip(tensor.parents, tensor.chain(tensor.grad), strict=True):
                parent.grad = grad if parent.grad is None else device.add(parent.grad, grad)
            tensor.grad = tensor.chain = None  # what the operation kept for this is free again


def add(a, b):
    """a + b, where b may lack leading dims of a: it is broadcast, so its gradient is a sum over them."""
    return Tensor(device.add(a.array, b.array), (a, b), lambda grad: device.add_backward(grad, a.array, b.array))


def matmul(a, b):
    """[.., m, k] @ [.., k, n]"""
    return Tensor(device.matmul(a.array, b.array), (a, b), lambda grad: device.matmul_backward(grad, a.array, b.array))


def reshape(x, *shape):
    return Tensor(device.reshape(x.array, shape), (x,), lambda grad: (device.reshape(grad, x.shape),))


def transpose(x, *axes):
    """Dim i of the result is dim axes[i] of x."""
    back = tuple(axes.index(i) for i in range(len(axes)))
    return Tensor(device.transpose(x.array, axes), (x,), lambda grad: (device.transpose(grad, back),))


def gather(table, indices):
    """Rows of a table [n, width], by an array of indices: [.., width]"""
    rows = device.gather(table.array, indices)
    return Tensor(rows, (table,), lambda grad: (device.gather_backward(grad, table.array, indices),))
