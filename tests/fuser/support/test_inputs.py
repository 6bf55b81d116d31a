"""Tensors that cannot be read by address and strides are resolved, or raise an error or a
warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from fuser import FusionDefinition, multidevice
from fuser.support.errors import InputError


def doubled(rank: int = 2) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1] * rank, contiguity=False)
        fd.add_output(fd.ops.add(x, x))
    return fd


def lazy(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a lazy negative view, and its value in float64."""
    z = torch.randn(*shape, dtype=torch.complex64)
    return z.conj().imag, -z.imag.double()


def test_a_lazy_negative_view_has_its_sign() -> None:
    fd = doubled()
    plain = torch.randn(3, 8)[:, ::2]
    for _ in range(2):
        view, expected = lazy((3, 4))
        assert view.is_neg() and view.stride() == plain.stride()
        for given, value in ((view, expected), (plain, plain.double())):
            (out,) = fd.execute([given])
            torch.testing.assert_close(out, (value * 2).float())


def test_a_lazy_view_in_a_library_op_and_a_view() -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=False) for _ in range(2))
        fd.add_output(fd.ops.matmul(fd.ops.permute(x, [1, 0]), w))
    (x, ex), (w, ew) = lazy((3, 4)), lazy((3, 5))
    for _ in range(2):
        (out,) = fd.execute([x, w])
        torch.testing.assert_close(out, (ex.T @ ew).float(), rtol=1e-5, atol=1e-5)


def test_a_lazy_view_is_no_target_of_an_update() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        fd.add_output(fd.ops.add(x, 1.0), x)
    with pytest.raises(InputError, match="updated in place, but is a lazy negative view"):
        fd.execute([lazy((3, 4))[0]])


@pytest.mark.parametrize("warm", [False, True])
def test_a_storage_that_was_freed_is_not_read(warm: bool) -> None:
    fd, x = doubled(), torch.randn(3, 4)
    if warm:
        fd.execute([x])
    x.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"48 bytes, whose storage was resized to 0"):
        fd.execute([x])
    y = torch.randn(3, 4)
    torch.testing.assert_close(fd.execute([y])[0], y + y)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a kernel must not touch this")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.empty(3, 3, device="meta"), "on device meta"),
        (lambda: torch.Tensor._make_wrapper_subclass(Wrapped, (3, 3)), "a Wrapped"),
    ],
    ids=["coo", "csr", "quantized", "nested", "meta", "subclass"],
)
def test_other_kinds_of_tensors_are_refused(make: Any, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    with pytest.raises(InputError, match=why):
        doubled().execute([tensor])


def test_a_gradient_that_is_lost_is_warned_about_once() -> None:
    fd, x = doubled(), torch.randn(2, 3, requires_grad=True)
    with pytest.warns(UserWarning, match="input 0, T0.*requires grad.*detach") as found:
        (out,) = fd.execute([x])
    assert found[0].filename == __file__  # the user's line, not one of ours
    assert not out.requires_grad
    torch.testing.assert_close(out, (x * 2).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.execute([x])
        fd.execute([torch.randn(4, 5, requires_grad=True)])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        doubled().execute([x])
        doubled().execute([torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)])


@pytest.mark.parametrize("is_known", [False, True], ids=["first call", "later call"])
def test_a_tangent_that_is_lost_is_warned_about_once(is_known: bool) -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        # A library op, a view and a kernel: torch would carry a tangent through the first two.
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.add_output(fd.ops.permute(y, [1, 0]))
        fd.add_output(fd.ops.relu(y))
        fd.add_output(fd.ops.add(x, 1.0), x)
    value, weight, tangent = torch.randn(3, 4), torch.randn(5, 4), torch.ones(3, 4)
    if is_known:
        fd.execute([value.clone(), weight])
    product = (value.double() @ weight.double().T).float()
    with forward_ad.dual_level():
        mine = value.clone()
        dual = forward_ad.make_dual(mine, tangent)
        with pytest.warns(UserWarning, match="input 0, T0.*tangent.*no output will carry"):
            outs = fd.execute([dual, weight])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fd.execute([forward_ad.make_dual(value.clone(), tangent), weight])
            fd.execute([value.clone(), weight])
        assert [forward_ad.unpack_dual(out).tangent for out in outs] == [None] * 3
    for out, want in zip(outs, (product, product.T, product.relu()), strict=True):
        torch.testing.assert_close(out, want)
    torch.testing.assert_close(mine, value + 1)


def test_replays_record_no_gradient() -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.linear(x, w)
        fd.add_output(fd.ops.permute(y, [1, 0]))
        fd.add_output(fd.ops.relu(y))
    plain, weight = torch.randn(3, 4), torch.randn(5, 4)
    asking = plain.clone().requires_grad_()
    expected = plain.double() @ weight.double().T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (plain, asking, plain, asking, asking):
            transposed, positive = fd.execute([given, weight])
            assert not transposed.requires_grad and not positive.requires_grad
            assert torch.is_grad_enabled()
            torch.testing.assert_close(transposed.double(), expected.T, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(positive.double(), expected.relu(), atol=1e-5, rtol=1e-5)


def test_a_returned_input_is_the_callers_tensor_and_shows_its_update() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(x)
        fd.add_output(fd.ops.add(x, 1.0), x)
        fd.add_output(fd.ops.mul(x, 2.0))
    for _ in range(2):
        t = torch.arange(4.0)
        outputs = fd.execute([t])
        assert outputs[0].data_ptr() == t.data_ptr()
        torch.testing.assert_close(t, torch.arange(4.0) + 1)
        # The program reads the value from the start of the call.
        torch.testing.assert_close(outputs[-1], torch.arange(4.0) * 2)


def test_a_lazy_view_is_sent_with_its_sign() -> None:
    from fuser import ParallelType

    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        out = fd.ops.set(x)
        fd.add_output(out)
        mesh = multidevice.DeviceMesh([0, 1])
        for tensor in (x, out):
            tensor.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    view, expected = lazy((6, 4))

    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        (out,) = fd.execute([view[3 * rank : 3 * rank + 3]])
        torch.testing.assert_close(out, expected.float())

    with multidevice.simulate(2) as world:
        world.run(body)
