"""The closed list of operations that the text of a graph may name, whoever wrote it.

A text is data: a name in it is looked up here, never among attributes. An operation is on the list if

1. its schema is functional: it writes to no operand, and takes and gives tensors, numbers, dtypes, devices
   and words alone (`is_pure`, asked of every overload when it is read);
2. it checks its operands itself, whatever they hold, before memory is read: a reviewed list of names, so that
   an operation of a later PyTorch is not on it by itself;
3. it reads and writes no file, no clock, no state of the process but the random numbers.

Functional by their schema, and left out: `from_file`, `_print`, `_test_*` (files and output); `set`,
`resize`, sparse, nested and quantized tensors, and what packs weights for another library (memory that no
shape tells); `ctc_loss`, `segment_reduce`, `*lu_solve`, `fractional_max_pool*`, gradients that take indices
or statistics of the forward pass, `_scaled_dot_product_*` (they trust values or strides that they are given).

Operations of another library are read only where the caller names the library, and must be functional; what
its code does with operands is the library's. Operations that talk to other processes are not run from a file.
"""

import functools
import re
from collections.abc import Collection
from typing import Any

import torch

READABLE: dict[str, bool] = {}
"""Our ops that the text of a graph may name, by their names: whether a graph from a file may run them."""
_ATEN = frozenset(
    """
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint
    affine_grid_generator alias alias_copy all allclose alpha_dropout amax amin aminmax angle any arange
    arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided
    as_strided_copy as_strided_scatter asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d
    avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm bernoulli bilinear
    binary_cross_entropy binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm broadcast_tensors
    broadcast_to bucketize cartesian_prod cat cauchy cdist ceil celu chain_matmul chalf channel_shuffle
    cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip clone col2im column_stack
    combinations complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh
    cosine_embedding_loss cosine_similarity count_nonzero cov cross cross_entropy_loss cummax cummin cumprod
    cumsum cumulative_trapezoid deg2rad det detach detach_copy diag diag_embed diagflat diagonal
    diagonal_backward diagonal_copy diagonal_scatter diff digamma dim dist div divide dot dropout dsplit
    dstack einsum elu elu_backward embedding embedding_bag empty empty_like empty_permuted empty_strided eq
    equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 exponential eye feature_alpha_dropout
    feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn
    fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fix flatten flip fliplr flipud float_power floor
    floor_divide fmax fmin fmod frac frexp frobenius_norm full full_like gather gcd ge gelu gelu_backward
    geometric ger glu glu_backward gradient greater greater_equal grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm gru gru_cell gt hamming_window hann_window hardshrink hardshrink_backward
    hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside
    hinge_embedding_loss histc histogram hsplit hstack huber_loss huber_loss_backward hypot i0 igamma
    igammac im2col imag index index_add index_copy index_fill index_put index_reduce index_select
    index_select_backward inner instance_norm inverse is_nonzero isclose isfinite isin isinf isnan isneginf
    isposinf isreal istft kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le leaky_relu
    leaky_relu_backward lerp less less_equal lgamma lift lift_fresh lift_fresh_copy linalg_cholesky
    linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matmul
    linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm
    linalg_pinv linalg_polar linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular
    linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
    linalg_vector_norm linear linspace log log10 log1p log2 log_normal log_sigmoid log_sigmoid_backward
    log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not
    logical_or logical_xor logit logit_backward logspace logsumexp lstm lstm_cell lt lu_unpack mH mT
    margin_ranking_loss masked_fill masked_scatter masked_select matmul matrix_H matrix_exp matrix_power max
    max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    maximum mean median meshgrid min minimum mish mish_backward mm mode moveaxis movedim mse_loss
    mse_loss_backward msort mul multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
    multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy
    native_channel_shuffle native_dropout native_group_norm native_layer_norm ne neg negative new_empty
    new_empty_strided new_full new_ones new_zeros nextafter nll_loss nll_loss2d nll_loss2d_forward
    nll_loss_forward nll_loss_nd nonzero nonzero_numpy nonzero_static norm norm_except_dim normal
    normal_functional not_equal nuclear_norm numel one_hot ones ones_like orgqr ormqr outer pad pad_sequence
    pairwise_distance pdist permute permute_copy pinverse pixel_shuffle pixel_unshuffle poisson
    poisson_nll_loss polar polygamma positive pow prelu prod put quantile rad2deg rand rand_like randint
    randint_like randn randn_like random randperm range ravel real reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu
    rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu rsqrt rsub scalar_tensor
    scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted select select_backward
    select_copy select_scatter selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc
    sinh size slice slice_backward slice_copy slice_inverse slice_scatter slogdet smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softmax softplus softplus_backward
    softshrink softshrink_backward sort special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma special_entr special_erf
    special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he special_i0
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
    special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
    special_softmax special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split split_copy
    split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze_copy stack std std_mean stft stride
    sub subtract sum sum_to_size svd swapaxes swapdims sym_is_contiguous sym_numel sym_size
    sym_storage_offset sym_stride t t_copy take take_along_dim tan tanh tanh_backward tensor_split tensordot
    threshold threshold_backward tile to topk trace transpose transpose_copy trapezoid trapz
    triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as
    unbind unbind_copy unflatten unfold unfold_copy uniform unique_consecutive unique_dim
    unique_dim_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where xlogy zero zeros
    zeros_like
    __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _aminmax
    _assert_async _assert_scalar _assert_tensor_metadata _cdist_forward _conj _conj_physical _convolution
    _embedding_bag _euclidean_dist _functional_assert_async _functional_assert_scalar _fused_rms_norm
    _grouped_mm _int_mm _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    _local_scalar_dense _log_softmax _log_softmax_backward_data _logcumsumexp _masked_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _prelu_kernel _reshape_alias _reshape_copy _safe_softmax _scaled_mm _softmax _softmax_backward_data
    _stack _to_copy _trilinear _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_int8pack_mm
    _weight_norm _weight_norm_interface
    """.split()  # noqa: SIM905
)
_PLAIN = frozenset("Tensor number int SymInt float bool str Device Scalar Generator".split())  # noqa: SIM905


@functools.lru_cache(maxsize=4096)
def is_pure(overload: Any) -> bool:
    """Whether an operation's schema says that it writes to nothing, and takes and gives plain values."""
    schema = getattr(overload, "_schema", None)
    if schema is None or schema.is_mutable or not (schema.returns or "::_assert" in schema.name):
        return False
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    kinds = (str(a.type) for a in (*schema.arguments, *schema.returns))
    return all(re.sub(r"Optional\[|List\[|\]", "", kind) in _PLAIN for kind in kinds)


def packet_of(name: str, libraries: Collection[str] = (), runs: bool = False) -> tuple[Any, list[str]]:
    """The operation that a text names as `add`, `add.Scalar`, `library.op` or `library.op.overload`, and what
    of the name is left: its overload, if it has one. `libraries`: whose operations may be named, besides
    PyTorch's and attngraph's. `runs`: the graph is to be run as it was read. ValueError where it is not on
    the list."""
    first, *more = name.split(".")
    if first == "aten" and more:
        first, *more = more
    if first in _ATEN and len(more) <= 1:
        return getattr(torch.ops.aten, first), more
    space, op, rest = first, more[0] if more else "", more[1:]
    if len(rest) <= 1:
        if space == "attngraph" and op in READABLE:
            if runs and not READABLE[op]:
                raise ValueError(f"{name} talks to other processes, which no graph from a file may do")
            return getattr(torch.ops.attngraph, op), rest
        if space in libraries and _is_registered(space, op):
            return getattr(getattr(torch.ops, space), op), rest
    if not _is_registered("aten", first) and not _is_registered(space, op):
        raise ValueError(
            f"there is no op {name}; if it is of a library, import that first (attngraph opt --import MODULE)"
        )
    raise ValueError(f"{name} is not on the list of operations that a graph in a file may have")


def _is_registered(space: str, op: str) -> bool:
    """Whether there is an operation of this name; asked without loading anything."""
    return any(n.partition(".")[0] == f"{space}::{op}" for n in torch._C._dispatch_get_all_op_names())


def of_library(module: str, before: Collection[str]) -> set[str]:
    """The libraries whose operations an import of `module` registered, `before` being those there were; and
    the one of its own name, if it had been imported already."""
    return (spaces() - set(before) | {module.partition(".")[0]}) - {"aten", "prims", "prim", "attngraph"}


def spaces() -> set[str]:
    """The libraries that have registered operations."""
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
