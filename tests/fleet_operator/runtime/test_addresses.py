"""Loopback addresses never collide."""

import os

import pytest

from fleet_operator.runtime import addresses
from fleet_operator.runtime.addresses import Addresses, NoAddressError


def test_two_runtimes_never_share_a_network(tmp_path):
    one, two = Addresses(tmp_path), Addresses(tmp_path)
    taken = [pool.take() for pool in (one, two) for _ in range(300)]
    assert len(set(taken)) == 600
    assert all(address.startswith("127.") for address in taken)
    one.close()
    two.close()


def test_an_address_that_came_back_is_used_last(tmp_path):
    pool = Addresses(tmp_path)
    first = pool.take()
    pool.give_back(first)
    rest = [pool.take() for _ in range(253)]
    assert first not in rest
    assert pool.take() == first
    pool.close()


def test_no_network_left_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "_NETWORKS", [(16, 1)])
    one, two = Addresses(tmp_path), Addresses(tmp_path)
    one.take()
    with pytest.raises(NoAddressError, match="all 1 loopback networks are in use"):
        two.take()
    one.close()
    assert two.take() == "127.16.1.1"
    two.close()


def test_lock_files_go_with_their_runtime_however_it_ended(tmp_path):
    killed = Addresses(tmp_path)
    killed.take()
    os.close(killed._locks[0][1])  # as the kernel does for a process that was killed
    mine, other = Addresses(tmp_path), Addresses(tmp_path)
    mine.take()
    other.take()
    assert len(list(tmp_path.iterdir())) == 2
    mine.close()
    assert [path.name for path in tmp_path.iterdir()] == [other.take().rpartition(".")[0]]
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_no_claim(tmp_path, monkeypatch):
    one = Addresses(tmp_path)
    one.take()
    path, _ = one._locks[0]
    real, raced = os.open, []

    def slow(*given):
        found = real(*given)
        if not raced:
            raced.append(one.close())  # the owner ends between our open and our lock
        return found

    monkeypatch.setattr(os, "open", slow)
    assert addresses._lock(path) is None
    assert not path.exists()
