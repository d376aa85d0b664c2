"""The loop of these tests: asyncio's, or with FLEET_TEST_LOOP=uvloop the one that routers run on, which differs at closed and
half-closed connections."""

import os

import uvloop

if os.environ.get("FLEET_TEST_LOOP") == "uvloop":
    uvloop.install()
