"""Write a store of your own: an fsspec file system that keeps all files in one SQLite database.
Python:  python examples/custom_store.py sqlite:///tmp/jobs.db/run-17
Hydra:   python examples/hydra_app.py imports=[custom_store] checkpoint.root=sqlite:///tmp/jobs.db/a
"""

import sqlite3
import sys
from typing import Any

import fsspec
from minimal import main


class SqliteFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system at ``sqlite:///folder/name.db``; a file is one row, written whole or not."""

    protocol = "sqlite"

    def _do(self, path: str, sql: str, *values: object) -> list[Any]:
        database, _, key = self._strip_protocol(path).partition(".db")
        with sqlite3.connect(f"{database}.db", timeout=60) as rows:  # commits or rolls back
            rows.execute("create table if not exists files (k text primary key, data blob)")
            return rows.execute(sql, [key.rstrip("/"), *values]).fetchall()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        at, found = self._strip_protocol(path), {}
        sql = "select substr(k, length(?1)+2), length(data) from files where instr(k, ?1||'/') = 1"
        for name, n in self._do(path, sql):
            top, rest, _ = name.partition("/")
            found[top] = {"name": f"{at}/{top}", "size": n, "type": "directory" if rest else "file"}
        return list(found.values()) if detail else [entry["name"] for entry in found.values()]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        for (data,) in self._do(path, "select data from files where k = ?"):
            return bytes(data[start:end])
        raise FileNotFoundError(path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        self._do(path, "insert or replace into files values (?, ?)", value)

    def rm_file(self, path: str) -> None:
        self._do(path, "delete from files where k = ?")

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "NewFile":
        return NewFile(self, path, mode)


class NewFile(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file that is stored when closed."""

    def _upload_chunk(self, final: bool = False) -> bool:  # False: keep collecting
        return final and self.fs.pipe_file(self.path, self.buffer.getvalue()) is None


fsspec.register_implementation("sqlite", SqliteFileSystem)

if __name__ == "__main__":
    main(sys.argv[1])
