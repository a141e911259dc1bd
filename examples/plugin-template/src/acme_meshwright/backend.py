"""A checkpoint backend: directories as meshwright writes them, and a journal next to them.

A place that is no file system implements every method of `meshwright_checkpoint.storage.backend.CheckpointStorage` instead.
"""

from __future__ import annotations

from meshwright_checkpoint.storage.filesystem import DirectoryStorage


class JournalStorage(DirectoryStorage):
    """A line in journal.txt for each checkpoint that appears or goes."""

    def commit(self, manifest: bytes) -> None:
        """Rank 0 makes the checkpoint appear, then says so."""
        super().commit(manifest)
        self._note("saved")

    def remove(self, save_id: str) -> None:
        """Rank 0 removes the checkpoint, then says so."""
        super().remove(save_id)
        self._note("removed")

    def children(self) -> list[DirectoryStorage]:
        """The checkpoints inside, kept in the same way."""
        return [JournalStorage(child.path) for child in super().children()]

    def parent(self) -> DirectoryStorage:
        """The directory around it."""
        return JournalStorage(self.path.parent)

    def _note(self, what: str) -> None:
        with open(self.path.parent / "journal.txt", "a", encoding="utf-8") as journal:
            journal.write(f"{what} {self.name}\n")
