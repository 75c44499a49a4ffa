"""A saved cache that is damaged, or somebody else's, is refused before a kernel reads a page by a number of
it."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph.errors import CacheError
from attngraph.models import targets
from attngraph.runtime import saved_cache
from attngraph.runtime.kv_cache import SAVED, KVCache

PROMPT = torch.arange(18).reshape(2, 9) % 7
CONFIGS = {
    "contiguous": attngraph.CacheConfig(),
    "paged": attngraph.CacheConfig(layout="paged", page=4),
    "rounded": attngraph.CacheConfig(layout="paged", page=4, dtype=torch.int8),
}


def made(kind: str, window: bool = False) -> tuple[Any, KVCache]:
    torch.manual_seed(0)
    model, _ = targets.tiny_decoder_lm(tokens=32)
    decoder = attngraph.compile(model.eval(), cache=CONFIGS[kind])
    return decoder, decoder.prefill(PROMPT)[1]


def written(path: Path, state: Any, sign: bool = True) -> Path:
    digest = saved_cache.digest(state) if sign else "0" * 64
    torch.save({"format": SAVED, "state": state, "digest": digest}, path)
    return path


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_state_goes_on_from_its_file_as_it_was(kind: str, tmp_path: Path) -> None:
    decoder, state = made(kind)
    state.save(tmp_path / "state")
    token = torch.tensor([[3], [5]])
    assert torch.equal(decoder.decode(token, KVCache.load(tmp_path / "state")), decoder.decode(token, state))


def group(state: Any) -> Any:
    return next(iter(state["groups"].values()))


def _lengthened(state: Any) -> None:
    state["lengths"][1] = 10**6


def _larger_page(state: Any) -> None:
    group(state)["page"] *= 1000


Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "a page that is not there": lambda s: group(s)["rows"][0].__setitem__(0, 10**7),
    "a page before the first": lambda s: group(s)["rows"][1].__setitem__(-1, -1),
    "a page that is a truth": lambda s: group(s)["rows"][0].__setitem__(0, False),
    "a page of two rows": lambda s: group(s)["rows"][1].__setitem__(0, group(s)["rows"][0][0]),
    "a row without pages": lambda s: group(s)["rows"][0].clear(),
    "rows of one list": lambda s: group(s)["rows"].__setitem__(1, group(s)["rows"][0]),
    "fewer rows": lambda s: group(s)["rows"].pop(),
    "larger pages": _larger_page,
    "pages of no tokens": lambda s: group(s).update(page=0),
    "no users": lambda s: group(s).update(users=[]),
    "more users": lambda s: group(s)["users"].append(0),
    "another number of users": lambda s: group(s)["users"].__setitem__(0, 2),
    "free pages that are in use": lambda s: group(s)["free"].append(group(s)["rows"][0][0]),
    "free pages that are not there": lambda s: group(s)["free"].append(10**6),
    "a longer row": _lengthened,
    "a negative length": lambda s: s["lengths"].__setitem__(0, -1),
    "a length that is no number": lambda s: s["lengths"].__setitem__(0, 2.0),
    "a length of many digits": lambda s: s["lengths"].__setitem__(0, 1 << 1000),
    "fewer lengths": lambda s: s["lengths"].pop(),
    "lost more than it has": lambda s: s["lost"].__setitem__(0, 100),
    "no limit": lambda s: s.update(limit="none"),
    "another rank": lambda s: s.update(rank=(3, 2)),
    "another device": lambda s: s.update(device="meta"),
    "no device": lambda s: s.update(device=5),
    "a narrower arena": lambda s: group(s)["arenas"].__setitem__(0, group(s)["arenas"][0][..., :1]),
    "an arena of fewer pages": lambda s: group(s)["arenas"].__setitem__(
        0, group(s)["arenas"][0][:, :1].clone()
    ),
    "an arena of strides zero": lambda s: group(s)["arenas"].__setitem__(
        0, group(s)["arenas"][0].flatten()[:1].expand(group(s)["arenas"][0].shape)
    ),
    "an arena of another dtype": lambda s: group(s)["arenas"].__setitem__(0, group(s)["arenas"][0].double()),
    "an arena that is sparse": lambda s: group(s)["arenas"].__setitem__(0, group(s)["arenas"][0].to_sparse()),
    "no arena": lambda s: group(s)["arenas"].clear(),
    "another group": lambda s: s["groups"].update(other=group(s)),
    "no groups": lambda s: s["groups"].clear(),
    "a plan of other shapes": lambda s: s["plan"]["stores"][0].update(shape=(0, 1, 0, 1)),
    "a plan of no shapes": lambda s: s["plan"]["stores"][0].update(shape="x"),
    "a plan of an axis that is not there": lambda s: s["plan"]["stores"][0].update(token_dim=9),
    "a plan of a team": lambda s: s["plan"]["stores"][0].update(team=3, member=5),
    "a plan of two of one name": lambda s: s["plan"].update(stores=s["plan"]["stores"][:1] * 2),
    "a plan of huge sums": lambda s: s["plan"].update(
        carried=[{"name": "c", "shape": [1 << 36], "dtype": torch.float32, "label": ""}]
    ),
    "a plan of sums beyond any memory": lambda s: s["plan"].update(
        carried=[{"name": "c", "shape": [1 << 40, 1 << 40], "dtype": torch.float32, "label": ""}]
    ),
    "a plan with more": lambda s: s["plan"].update(more=1),
    "a configuration of no page": lambda s: s["config"].update(page=0),
    "a configuration of another dtype": lambda s: s["config"].update(dtype=torch.complex64),
    "values of a prompt": lambda s: s.update(fixed={"x": torch.ones(2)}),
    "what is carried": lambda s: s["carried"]["values"].update(x=torch.ones(2)),
    "earlier values": lambda s: s["carried"].update(earlier=[([1, 2], {})]),
    "nothing": lambda s: s.clear(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_whose_numbers_do_not_go_together_is_refused(change: str, tmp_path: Path) -> None:
    state = copy.deepcopy(made("paged")[1].__getstate__())
    CHANGES[change](state)
    with pytest.raises(CacheError, match=r"a saved cache cannot be used(?!.*has changed)"):
        KVCache.load(written(tmp_path / "state", state, sign=False))


def test_damage_that_leaves_a_state_possible_is_noticed(tmp_path: Path) -> None:
    state = copy.deepcopy(made("paged")[1].__getstate__())
    state["lengths"] = [9, 2]
    with pytest.raises(CacheError, match="has changed"):
        KVCache.load(written(tmp_path / "state", state, sign=False))


def test_a_file_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "state", made("paged")[1].__getstate__())
    with (
        zipfile.ZipFile(path) as given,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for name in given.namelist():
            out.writestr(name, given.read(name))
    with pytest.raises(CacheError, match="is packed"):
        KVCache.load(tmp_path / "packed")


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "written",))

    torch.save({"format": SAVED, "state": Hostile()}, tmp_path / "state")
    with pytest.raises(CacheError, match="holds no saved cache"):
        KVCache.load(tmp_path / "state")
    assert not (tmp_path / "written").exists()
