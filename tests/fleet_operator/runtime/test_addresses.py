"""Loopback addresses never collide."""

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
