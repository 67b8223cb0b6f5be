"""Who sees whom in a mask window, written out by hand and by loops, for training and for decoding."""

import pytest
import torch

from kernels.window import additive, causal_mask, context_windows, decoding_mask, training_windows


def grid(*rows):
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def test_decoding_mask_by_hand():
    found = decoding_mask(cached=2, new=2, window_rows=2)
    assert torch.equal(found, grid("xxx...", "xxxx..", "xxxxxx", "xxxxxx"))


def test_no_window_rows_is_the_causal_pattern():
    assert torch.equal(causal_mask(cached=1, new=3), grid("xx..", "xxx.", "xxxx"))
    assert torch.equal(causal_mask(cached=0, new=4), torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize("cached", [0, 1, 5])
@pytest.mark.parametrize("new", [1, 3])
def test_cached_rows_are_seen_by_all_and_the_prefix_never_sees_a_mask(cached, new):
    whole = decoding_mask(cached=0, new=cached + new, window_rows=3)
    assert torch.equal(decoding_mask(cached=cached, new=new, window_rows=3), whole[cached:])
    assert not whole[: cached + new, cached + new :].any()


def layout_of(anchors, lengths, *, text, window):
    return training_windows(torch.tensor(anchors), torch.tensor(lengths), text=text, window=window)


def test_training_windows_by_hand():
    found = layout_of([[1, 2]], [4], text=4, window=3)
    assert found.positions_BR.tolist() == [[0, 1, 2, 3, 1, 2, 2, 3]]
    assert found.source_BWG.tolist() == [[[0, 4, 5], [1, 6, 7]]]
    assert found.target_BWG.tolist() == [[[1, 2, 3], [2, 3, 4]]]
    assert found.valid_BWG.tolist() == [[[True, True, True], [True, True, False]]]
    wanted = grid("x.......", "xx......", "xxx.....", "xxxx....", "x...xx..", "x...xx..", "xx....xx", "xx....xx")
    assert torch.equal(found.sees_BRC[0], wanted)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_training_window_sees_what_a_decoding_window_sees(window):
    """Anchors nearer to one another than the window, equal ones, and one at the end of the text."""
    anchors, text = [[1, 2, 2, 7, 8], [3, 4, 1, 5, 5]], 9
    found = layout_of(anchors, [9, 6], text=text, window=window)
    span = window - 1
    for b, row in enumerate(anchors):
        for w, anchor in enumerate(row):
            own = list(range(text + w * span, text + (w + 1) * span))
            columns = [*range(anchor), *own]
            rows = [anchor - 1, *own]
            seen = found.sees_BRC[b, rows]
            assert torch.equal(seen[:, columns], decoding_mask(cached=anchor - 1, new=1, window_rows=span))
            rest = [c for c in range(text + len(row) * span) if c not in columns]
            assert not seen[:, rest].any(), "nothing clean from its own span, nothing of another window"
            assert found.source_BWG[b, w].tolist() == rows
            assert found.positions_BR[b, rows].tolist() == list(range(anchor - 1, anchor + span))


def test_targets_end_with_the_text_not_with_its_padding():
    found = layout_of([[2], [2]], [3, 6], text=6, window=4)
    assert found.valid_BWG[:, 0].tolist() == [[True, False, False, False], [True] * 4]


def test_context_windows_by_hand():
    found = context_windows(torch.tensor([[1, 3]]), torch.tensor([4]), cached=3, window=3)
    assert found.positions_BR.tolist() == [[0, 1, 2, 2, 3, 4]]
    assert found.source_BWG.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert found.target_BWG.tolist() == [[[1, 2, 3], [3, 4, 5]]]
    assert found.valid_BWG.tolist() == [[[True, True, True], [True, False, False]]]
    wanted = grid("...x.....", "...xxx...", "...xxx...", "xx....x..", "xx....xxx", "xx....xxx")
    assert torch.equal(found.sees_BRC[0], wanted)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_context_window_sees_what_a_decoding_window_sees(window):
    """Equal anchors, anchors nearer than the window, one without anything cached before its pending token."""
    anchors, cached = [[1, 2, 2, 7, 8], [3, 4, 1, 5, 5]], 8
    found = context_windows(torch.tensor(anchors), torch.tensor([9, 6]), cached=cached, window=window)
    for b, row in enumerate(anchors):
        for w, anchor in enumerate(row):
            rows = list(range(w * window, (w + 1) * window))
            columns = [*range(anchor - 1), *(cached + r for r in rows)]
            seen = found.sees_BRC[b, rows]
            assert torch.equal(seen[:, columns], decoding_mask(cached=anchor - 1, new=1, window_rows=window - 1))
            rest = [c for c in range(cached + len(row) * window) if c not in columns]
            assert not seen[:, rest].any(), "nothing cached from its own span, nothing of another window"
            assert found.source_BWG[b, w].tolist() == rows
            assert found.positions_BR[b, rows].tolist() == list(range(anchor - 1, anchor - 1 + window))


def test_a_window_needs_a_token_before_it():
    with pytest.raises(AssertionError, match="before it"):
        layout_of([[0]], [4], text=4, window=2)
    with pytest.raises(AssertionError, match="before it"):
        context_windows(torch.tensor([[0]]), torch.tensor([4]), cached=3, window=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_bias_is_finite_and_shuts_a_column_out(dtype):
    bias = additive(grid("x.", "xx"), dtype)
    assert bias.dtype == dtype
    assert torch.isfinite(bias).all()
    assert bias[0, 1] < -1e30
    assert (bias[0, 0], *bias[1]) == (0, 0, 0)
    assert torch.equal(bias.float().softmax(-1)[0], torch.tensor([1.0, 0.0]))
