"""Pieces of work in threads of their own."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from vitsee_core.runtime.threads import run_split


@pytest.mark.parametrize("inference", [True, False])
def test_each_piece_has_one_core_and_the_callers_mode(inference: bool) -> None:
    found: dict[int, tuple[int, bool, bool]] = {}
    threads: set[int] = set()

    def note(piece: int, items: range) -> None:
        mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        found[piece] = (torch.get_num_threads(), *mode)
        threads.add(threading.get_ident())

    before = torch.get_num_threads()
    with torch.inference_mode(inference):
        run_split(note, 30, 5)
    assert found == dict.fromkeys(range(5), (1, inference, False))
    assert threading.get_ident() not in threads
    assert torch.get_num_threads() == before


def test_a_plain_piece_is_the_callers_own() -> None:
    threads: dict[int, int] = {}

    def note(piece: int, items: range) -> None:
        threads[piece] = threading.get_ident()
        assert not torch.is_grad_enabled()

    run_split(note, 30, 3, plain=True)
    assert sorted(threads) == [0, 1, 2]
    assert threads[2] == threading.get_ident() not in (threads[0], threads[1])


def test_a_single_piece_stays_with_its_caller() -> None:
    threads: list[int] = []
    run_split(lambda piece, items: threads.append(threading.get_ident()), 3, 1)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize(
    ("n_items", "n_pieces"), [(7, 3), (3, 3), (0, 1), (2, 4), (100, 7)]
)
def test_every_item_is_in_one_piece(n_items: int, n_pieces: int) -> None:
    found: dict[int, range] = {}
    run_split(found.__setitem__, n_items, n_pieces)
    assert [item for piece in sorted(found) for item in found[piece]] == list(
        range(n_items)
    )
    lengths = {len(items) for items in found.values()}
    assert max(lengths) - min(lengths) <= 1


def test_threads_that_start_later_keep_all_cores() -> None:
    run_split(lambda piece, items: None, 2, 2)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [torch.get_num_threads()]


def test_an_error_is_raised_once_all_have_ended() -> None:
    ended = []

    def work(piece: int, items: range) -> None:
        if piece == 0:
            raise RuntimeError("no memory")
        ended.append(piece)

    with pytest.raises(RuntimeError, match="no memory"):
        run_split(work, 4, 2)
    assert ended == [1]


def run_two(found: multiprocessing.Queue[int]) -> None:
    run_split(lambda piece, items: found.put(piece), 2, 2)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    run_split(lambda piece, items: None, 2, 2)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    child = context.Process(target=run_two, args=(found,))
    child.start()
    assert {found.get(timeout=30), found.get(timeout=30)} == {0, 1}
    child.join(timeout=30)
    assert child.exitcode == 0
