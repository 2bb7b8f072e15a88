"""Key-value stores through which ranks find each other."""

from gradsync.stores.collectives import StoreCollectives
from gradsync.stores.fake import FakeStore
from gradsync.stores.file import FileStore
from gradsync.stores.hash import HashStore
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.store import Store
from gradsync.stores.tcp import TCPStore
from gradsync.stores.torch_store import from_torch, to_torch
from gradsync.stores.unix import UnixStore

__all__ = [
    "FakeStore",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "StoreCollectives",
    "TCPStore",
    "UnixStore",
    "from_torch",
    "to_torch",
]
