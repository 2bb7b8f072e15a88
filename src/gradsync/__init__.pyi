"""The public names, for type checkers; ``__init__.py`` loads them on first use."""

from gradsync.base.dtypes import ReduceOp as ReduceOp
from gradsync.errors import AbortedError as AbortedError
from gradsync.errors import BackendUnavailable as BackendUnavailable
from gradsync.errors import CollectiveTimeout as CollectiveTimeout
from gradsync.errors import DistBackendError as DistBackendError
from gradsync.errors import DistError as DistError
from gradsync.errors import DistNetworkError as DistNetworkError
from gradsync.errors import DistStoreError as DistStoreError
from gradsync.errors import InternalError as InternalError
from gradsync.errors import MismatchError as MismatchError
from gradsync.errors import PeerLostError as PeerLostError
from gradsync.errors import QueueEmptyError as QueueEmptyError
from gradsync.errors import RankFailedError as RankFailedError
from gradsync.errors import RendezvousError as RendezvousError
from gradsync.errors import StoreConnectionError as StoreConnectionError
from gradsync.errors import StoreTimeout as StoreTimeout
from gradsync.errors import UsageError as UsageError
from gradsync.group.collectives import all_reduce as all_reduce
from gradsync.group.collectives import barrier as barrier
from gradsync.group.collectives import broadcast as broadcast
from gradsync.group.group import ProcessGroup as ProcessGroup
from gradsync.launch.spawn import spawn as spawn
from gradsync.rendezvous.meeting import register_rendezvous_handler as register_rendezvous_handler
from gradsync.rendezvous.meeting import rendezvous as rendezvous
from gradsync.session import destroy_process_group as destroy_process_group
from gradsync.session import get_backend as get_backend
from gradsync.session import get_rank as get_rank
from gradsync.session import get_world_size as get_world_size
from gradsync.session import init_process_group as init_process_group
from gradsync.session import is_available as is_available
from gradsync.session import is_initialized as is_initialized
from gradsync.stores.file import FileStore as FileStore
from gradsync.stores.hash import HashStore as HashStore
from gradsync.stores.prefix import PrefixStore as PrefixStore
from gradsync.stores.store import Store as Store
from gradsync.stores.tcp import TCPStore as TCPStore

__version__: str
