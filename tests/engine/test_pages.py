"""Who has which page, and which pages later prompts find."""

import random

import pytest

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex


def test_pages_are_taken_once_and_given_back():
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(1)
    assert sorted([*first, *second]) == [1, 2, 3, 4]
    assert pool.take(1) is None
    pool.release(first)
    assert pool.available == 3
    pool.check({second[0]: 1})
    with pytest.raises(ValueError, match="more often"):
        pool.release(first)


def test_shared_pages_are_free_when_the_last_user_lets_go():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.share(pages)
    pool.release(pages)
    assert pool.available == 1
    pool.release(pages)
    assert pool.available == 3
    with pytest.raises(KeyError):
        pool.share(pages)


def test_cached_pages_are_used_anew_in_the_order_in_which_they_were_let_go_last_ones_of_a_text_first():
    pool, forgotten = PagePool(5), []
    pool.forget = forgotten.append
    old, new = pool.take(2), pool.take(2)
    pool.release(old, lambda page: True)
    pool.release(new, lambda page: True)
    assert pool.available == pool.cached == 4
    pool.share([old[0]])
    taken = pool.take(3)
    assert taken == [old[1], new[1], new[0]] == forgotten
    assert pool.take(1) is None


def test_a_prefix_is_found_by_whole_pages_from_its_beginning():
    pool = PagePool(8)
    index = PrefixIndex(pool, 4)
    text = list(range(11))
    keys, pages = index.keys(text, "salt"), pool.take(3)
    assert len(keys) == 2
    index.add(keys, pages)
    assert index.find(index.keys([*text[:8], 99, 98], "salt")) == pages[:2]
    assert index.find(index.keys([*text[:4], 99, *text[5:]], "salt")) == pages[:1]
    assert index.find(index.keys([99, *text[1:]], "salt")) == []
    assert index.find(index.keys(text, "another")) == []
    # Each page found has one more user.
    pool.check({pages[0]: 3, pages[1]: 2, pages[2]: 1})


def test_equal_tokens_after_other_tokens_are_another_page():
    pool = PagePool(8)
    index = PrefixIndex(pool, 2)
    keys = index.keys([1, 2, 1, 2], "")
    assert len(set(keys)) == 2


def test_keys_that_are_known_are_not_computed_again():
    index = PrefixIndex(PagePool(8), 2)
    text = [5, 6, 7, 8, 9]
    assert index.keys(text, "", index.keys(text[:3], "")) == index.keys(text, "")


def test_pages_used_anew_are_found_no_more():
    pool = PagePool(3)
    index = PrefixIndex(pool, 2)
    keys, pages = index.keys([1, 2, 3, 4], ""), pool.take(2)
    index.add(keys, pages)
    pool.release(pages, index.holds)
    assert index.find(keys) == pages
    pool.release(pages, index.holds)
    pool.take(1)
    assert index.find(keys) == pages[:1]
    assert not index.holds(pages[1])


def test_the_first_page_of_a_content_stays_the_one():
    pool = PagePool(5)
    index = PrefixIndex(pool, 2)
    keys, first, second = index.keys([1, 2], ""), pool.take(1), pool.take(1)
    index.add(keys, first)
    index.add(keys, second)
    pool.release(second, index.holds)
    assert index.find(keys) == first
    assert pool.cached == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_whatever_comes(seed):
    """Texts that begin alike come and go at random, as often refused as served."""
    rng = random.Random(seed)
    pool = PagePool(12)
    index = PrefixIndex(pool, 2)
    alive: list[list[int]] = []
    for _ in range(400):
        if alive and rng.random() < 0.5:
            pool.release(alive.pop(rng.randrange(len(alive))), index.holds)
        else:
            text = [rng.randrange(2) for _ in range(rng.randrange(2, 12))]
            keys = index.keys(text, "")
            found = index.find(keys)
            taken = pool.take(len(keys) - len(found))
            if taken is None:
                pool.release(found, index.holds)
            else:
                index.add(keys, found + taken)
                alive.append(found + taken)
        users: dict[int, int] = {}
        for page in (page for pages in alive for page in pages):
            users[page] = users.get(page, 0) + 1
        pool.check(users)
