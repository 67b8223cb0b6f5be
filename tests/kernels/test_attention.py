"""Tree attention: what a dense mask gives, and the same bits in every pass of as many rows."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import lay_out, pack, path_words, tree_attention, unpack
from kernels.tree import Tree, ancestors_NN, best_first, chain, prefix_trie
from tests.kernels.laws import random_q

KEY_HEADS, GROUP, WIDTH, BLOCK, ROWS = 2, 3, 16, 8, 13
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
DTYPES = list(TOLERANCE)


def random_parents(nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, n, (), generator=generator)) if n else -1 for n in range(nodes)]


TREES = {
    "pending alone": [],
    "chain": chain(torch.arange(11)).parents,
    "star": [-1] * 7,
    "trie": prefix_trie(torch.randint(0, 3, (4, 4), generator=torch.Generator().manual_seed(0))).tree.parents[:12],
    "best first": best_first(random_q(4, 4, 0).float().log(), nodes=12, width=4).parents,
    "random": random_parents(12, 1),
}


def tensors(rows, prefix, dtype, *, group=GROUP, width=WIDTH, seed=0):
    """Queries of a pass, and keys and values of its prefix and of its own rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (KEY_HEADS * group, rows, width), *[(KEY_HEADS, prefix + rows, width)] * 2
    return [torch.randn(shape, generator=generator).mul(2).to(dtype) for shape in shapes]


def attend(q, k, v, words, *, prefix, block=BLOCK):
    return tree_attention(q, k, v, lay_out(words, prefix=prefix, block=block), scaling=q.shape[2] ** -0.5)


def dense(q, k, v, words, *, prefix):
    """PyTorch's own attention under a dense mask, in float32."""
    rows = len(words)
    sees = torch.cat([torch.ones(rows, prefix, dtype=torch.bool), unpack(words)], 1)
    k, v = (x.float().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    return F.scaled_dot_product_attention(q.float()[None], k[None], v[None], attn_mask=sees)[0]


@pytest.mark.parametrize("nodes", [0, 1, 63, 64, 65, 200, 255])
def test_words_hold_the_ancestors(nodes):
    parents = random_parents(nodes, nodes)
    words = path_words(parents, rows=nodes + 1)
    assert words.shape == (nodes + 1, nodes // 64 + 1)
    sees = unpack(words)
    assert torch.equal(sees[1:, 1:], ancestors_NN(Tree(torch.arange(nodes), parents)))
    assert sees[:, 0].all()
    assert sees[0].sum() == 1
    assert torch.equal(pack(sees), words)


def test_words_of_padding_are_empty_and_sizes_are_checked():
    assert unpack(path_words([-1, 0], rows=5)).sum(1).tolist() == [1, 2, 3, 0, 0]
    assert unpack(pack(torch.zeros(0, 0, dtype=torch.bool))).shape == (0, 0)
    for nodes, rows in ((3, 3), (256, 257)):
        with pytest.raises(ValueError, match="do not fit"):
            path_words([-1] * nodes, rows=rows)
    with pytest.raises(ValueError, match="smaller tree"):
        pack(torch.eye(257, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least 1"):
        lay_out(path_words([], rows=1), prefix=3, block=0)
    with pytest.raises(AssertionError, match="rows before it"):
        lay_out(pack(torch.ones(2, 2, dtype=torch.bool)), prefix=3, block=4)


@pytest.mark.parametrize("prefix", [0, 2, 8, 9])
def test_a_layout_by_hand(prefix):
    """Rows: pending, its child, that one's child, and a second child of the pending token."""
    paths = lay_out(path_words([-1, 0, -1], rows=5), prefix=prefix, block=4)
    assert (paths.seen_N - prefix).tolist() == [1, 2, 3, 2, 0]
    first = prefix // 4 * 4
    texts = [[*range(first, prefix), *(prefix + row for row in path)] for path in ([0, 1, 2], [0, 3])]
    assert paths.leaf_N[[2, 3]].tolist() == [0, 1]
    assert paths.column_LP.shape[1] % 4 == 0
    for found, text in zip(paths.column_LP.tolist(), texts, strict=True):
        assert found == text + [text[-1]] * (len(found) - len(text))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [0, 1, 7, 8, 29])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_it_is_attention_under_the_trees_mask(parents, prefix, dtype):
    words = path_words(parents, rows=len(parents) + 1)
    q, k, v = tensors(len(words), prefix, dtype)
    found = attend(q, k, v, words, prefix=prefix)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), dense(q, k, v, words, prefix=prefix), **TOLERANCE[dtype])


@pytest.mark.parametrize("block", [1, 3, 64])
def test_any_block_will_do(block):
    words = path_words(TREES["random"], rows=ROWS)
    q, k, v = tensors(ROWS, 10, torch.float32, group=1)
    torch.testing.assert_close(
        attend(q, k, v, words, prefix=10, block=block), dense(q, k, v, words, prefix=10), **TOLERANCE[torch.float32]
    )


def test_no_rows_and_nothing_but_padding():
    for prefix in (0, 8, 11):
        q, k, v = tensors(0, prefix, torch.float32)
        assert attend(q, k, v, pack(torch.zeros(0, 0, dtype=torch.bool)), prefix=prefix).shape == q.shape
        q, k, v = tensors(3, prefix, torch.float32)
        k[:, prefix:] = v[:, prefix:] = torch.nan
        found = attend(q, k, v, torch.zeros(3, 1, dtype=torch.int64), prefix=prefix)
        wanted = F.scaled_dot_product_attention(
            q.unflatten(0, (KEY_HEADS, GROUP)).flatten(1, 2), k[:, :prefix], v[:, :prefix]
        )
        if prefix:  # padding sees the prefix alone
            torch.testing.assert_close(found, wanted.reshape(q.shape), **TOLERANCE[torch.float32])


def test_extreme_scores_and_junk_beyond_a_rows_path_are_harmless():
    words = path_words([-1, 0, -1], rows=6)
    q, k, v = tensors(6, 5, torch.float32)
    q *= 100
    found = attend(q, k, v, words, prefix=5)
    torch.testing.assert_close(found, dense(q, k, v, words, prefix=5), atol=1e-4, rtol=1e-4)
    k[:, 9:] = v[:, 9:] = torch.nan
    q[:, 4:] = torch.inf
    assert torch.equal(attend(q, k, v, words, prefix=5)[:, :4], found[:, :4])


def twins(q, k, v, words, prefix, row):
    """The row's text read in two other ways at the same row count, beside junk: (q, k, v, words, prefix, row).

    As the end of a chain, which is what a plain text gives that is read a few tokens at once, and alone behind a longer
    prefix, which is what it gives one token at a time.
    """
    path, rows = unpack(words)[row].nonzero()[:, 0], len(words)
    for own in (path, path[-1:]):
        cached = prefix + len(path) - len(own)
        text = [torch.cat([x[:, :prefix], x[:, prefix + path]], 1) for x in (k, v)]
        q2, k2, v2 = tensors(rows, cached, q.dtype, group=len(q) // len(k), width=q.shape[2], seed=9)
        q2[:, : len(own)] = q[:, own]
        k2[:, : prefix + len(path)], v2[:, : prefix + len(path)] = text
        k2[:, prefix + len(path) :] = torch.nan
        yield q2, k2, v2, path_words(list(range(-1, len(own) - 2)), rows=rows), cached, len(own) - 1


def check_bits(parents, prefix, dtype, *, rows=ROWS, block=BLOCK, **sizes):
    words = path_words(parents, rows=rows)
    q, k, v = tensors(rows, prefix, dtype, **sizes)
    found = attend(q, k, v, words, prefix=prefix, block=block)
    for row in range(len(parents) + 1):
        for *pass_, cached, own in twins(q, k, v, words, prefix, row):
            assert torch.equal(attend(*pass_, prefix=cached, block=block)[:, own], found[:, row]), (row, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [0, 6, 24])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_a_row_has_the_bits_it_has_in_a_chain_and_alone(parents, prefix, dtype):
    check_bits(parents, prefix, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (2, 1), (3, 3), (16, 1), (16, 3)])
def test_bits_at_other_row_counts_and_at_a_real_head_size(rows, group, dtype):
    check_bits(random_parents(min(rows, 9) - 1, 2), 37, dtype, rows=rows, group=group, width=64, block=32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_a_row_alone_has_the_bits_it_has_in_a_tree(group, dtype):
    """In passes of other row counts: a property of MKL's products, kept by never giving them fewer than 4 rows."""
    words = path_words(TREES["random"], rows=ROWS)
    q, k, v = tensors(ROWS, 37, dtype, group=group, width=64)
    found = attend(q, k, v, words, prefix=37, block=32)
    for row in range(ROWS):
        path = unpack(words)[row].nonzero()[:, 0]
        text = [torch.cat([x[:, :37], x[:, 37 + path]], 1) for x in (k, v)]
        alone = attend(q[:, row : row + 1], *text, path_words([], rows=1), prefix=36 + len(path), block=32)
        assert torch.equal(alone[:, 0], found[:, row]), row


def test_a_buffer_longer_than_the_text_gives_the_same_bits():
    """Keys as a cache hands them out: a view of a buffer with room behind it."""
    words = path_words(TREES["random"], rows=ROWS)
    q, k, v = tensors(ROWS, 20, torch.float32)
    roomy = [F.pad(x, (0, 0, 0, 31), value=torch.nan)[:, : x.shape[1]] for x in (k, v)]
    assert torch.equal(attend(q, *roomy, words, prefix=20), attend(q, k, v, words, prefix=20))


def test_a_dense_mask_does_not_keep_the_bits():
    """The reason for all this: over the tree's own order of rows some row comes out different."""
    words = path_words(TREES["random"], rows=ROWS)
    q, k, v = tensors(ROWS, 6, torch.float32)
    found = dense(q, k, v, words, prefix=6)
    same = []
    for row in range(ROWS):
        *_, (q2, k2, v2, words2, cached, own) = twins(q, k, v, words, 6, row)
        k2 = k2.nan_to_num(0.0)
        same.append(torch.equal(dense(q2, k2, v2, words2, prefix=cached)[:, own], found[:, row]))
    assert not all(same)
