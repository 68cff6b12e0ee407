# SPDX-License-Identifier: Apache-2.0
"""The blocks of a paged cache: which sequence owns them, and which hold a prefix that another sequence can reuse.

A block holds the states of `BLOCK` consecutive tokens. This module only counts and maps blocks; their memory belongs to
the states of the layers (`states.Pages`). A block is free, or referenced by one or more sequences. A free block keeps
its contents, and so its entry in the prefix map, until it is allocated again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK = 32
"""The number of tokens whose keys and values a block holds."""

DUMMY = 0
"""The block that no sequence owns, for padding rows of a batch."""

Key = tuple[int, tuple[int, ...], str]
"""The exact key of a prefix: (block of the preceding tokens or -1, the `BLOCK` tokens, salt). Nothing is hashed away,
so two prefixes never collide."""


@dataclass
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        salt: the owner of the prefixes; sequences with different salts share no blocks.
        blocks: the block of tokens [i * BLOCK, (i + 1) * BLOCK) for each i.
        computed: the number of tokens whose states the blocks hold.
        entered: the number of leading blocks in the prefix map.
    """

    salt: str = ""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    entered: int = 0


class BlockPool:
    """A fixed number of blocks with reference counts, a prefix map, and eviction of the least recently used prefix.

    Args:
        blocks: the number of blocks, including `DUMMY`.

    >>> pool = BlockPool(8)
    >>> first, second = BlockTable(), BlockTable()
    >>> tokens = list(range(70))
    >>> pool.reuse_prefix(first, tokens), pool.reserve(first, len(tokens))
    (0, True)
    >>> pool.mark_computed(first, tokens, len(tokens))
    >>> pool.reuse_prefix(second, tokens), second.blocks == first.blocks[:2]
    (64, True)
    """

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        # Free blocks; the first is allocated next. Blocks without a prefix come first, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(DUMMY + 1, blocks))
        self._prefixes: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def free(self) -> int:
        """The number of blocks that a sequence could take now, including those that hold a cached prefix."""
        return len(self._free)

    @property
    def size(self) -> int:
        """The number of blocks that sequences can own."""
        return len(self._references) - 1

    def find_prefix(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest known prefix of ``tokens``.

        The prefix never includes the last token: logits are not cached, so the model must run this token.
        """
        found: list[int] = []
        parent = -1
        for start in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            block = self._prefixes.get((parent, tuple(tokens[start : start + BLOCK]), salt))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def count_needed(self, salt: str, tokens: Sequence[int], length: int) -> int:
        """Return how many free blocks a new sequence takes that starts with ``tokens`` and grows to ``length``.

        Free blocks of a known prefix count, because the sequence takes them, too.
        """
        known = self.find_prefix(salt, tokens)
        return count_blocks(length) - sum(self._references[block] > 0 for block in known)

    def reuse_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Give an empty table the blocks of the longest known prefix; return the number of their tokens."""
        table.blocks = self.find_prefix(table.salt, tokens)
        for block in table.blocks:
            self._reference(block)
        table.entered = len(table.blocks)
        table.computed = BLOCK * table.entered
        return table.computed

    def reserve(self, table: BlockTable, length: int) -> bool:
        """Extend a table to ``length`` tokens. If too few blocks are free, change nothing and return False."""
        missing = count_blocks(length) - len(table.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            key = self._keys.pop(block, None)
            if key is not None:
                del self._prefixes[key]
            self._references[block] = 1
            table.blocks.append(block)
        return True

    def mark_computed(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Record that the states of ``tokens[:computed]`` exist, and enter the full blocks into the prefix map.

        Of two sequences that compute the same block, the second takes the block of the first. So the parent of an
        entered block is always referenced by the sequences that reference the block.
        """
        table.computed = computed
        for i in range(table.entered, computed // BLOCK):
            parent = table.blocks[i - 1] if i else -1
            key = parent, tuple(tokens[i * BLOCK : (i + 1) * BLOCK]), table.salt
            known = self._prefixes.get(key)
            if known is None:
                self._prefixes[key] = table.blocks[i]
                self._keys[table.blocks[i]] = key
            elif known != table.blocks[i]:
                self._reference(known)
                self._release([table.blocks[i]])
                table.blocks[i] = known
            table.entered = i + 1

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table. Their prefixes stay known until the blocks are allocated again."""
        self._release(reversed(table.blocks))
        table.blocks = []
        table.computed = table.entered = 0

    def _reference(self, block: int) -> None:
        self._free.pop(block, None)
        self._references[block] += 1

    def _release(self, blocks: Iterable[int]) -> None:
        """Release blocks, the last of a sequence first: so no prefix is evicted before those that continue it."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError unless the counts agree with ``tables``, which are all tables with blocks."""
        counts = [0] * len(self._references)
        for table in tables:
            for block in table.blocks:
                counts[block] += 1
        free = {block for block, count in enumerate(counts) if count == 0} - {DUMMY}
        if counts != self._references or counts[DUMMY] or set(self._free) != free:
            raise RuntimeError(f"blocks: the tables reference {counts}, the pool counts {self._references}")
        if {block: key for key, block in self._prefixes.items()} != self._keys:
            raise RuntimeError("blocks: the prefix map and the keys of its blocks differ")
        ages = dict.fromkeys(self._keys, len(counts)) | {block: age for age, block in enumerate(self._free)}
        for block, (parent, _, _) in self._keys.items():
            if parent >= 0 and (parent not in self._keys or ages[block] > ages[parent]):
                raise RuntimeError(f"blocks: block {parent} is evicted before block {block}, which continues it")


def count_blocks(tokens: int) -> int:
    """Return the number of blocks of a sequence of ``tokens`` tokens.

    >>> count_blocks(0), count_blocks(32), count_blocks(33)
    (0, 1, 2)
    """
    return -(-tokens // BLOCK)
