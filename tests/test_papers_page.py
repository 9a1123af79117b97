"""docs/guide/papers.md: written from the recipes of `vitsee study`, whose checkpoints exist."""

from __future__ import annotations

import papers_page
import timm

from vitsee_core.study.recipe_file import read_recipe


def test_the_page_is_what_its_script_writes() -> None:
    assert papers_page.PAGE.read_text() == papers_page.page()


def test_every_checkpoint_exists() -> None:
    known = {*timm.list_pretrained(), *timm.list_models()}
    recipes = map(read_recipe, papers_page.PAPERS)
    named = [
        store.model.split("?")[0]
        for recipe in recipes
        for store in recipe.stores.values()
    ]
    assert [name for name in named if name not in known] == []
