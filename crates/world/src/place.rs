//! Which rank this process is and where the ranks meet: from what a launcher sets, or from an address.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Cancel, Error, ErrorKind, FileStore, PrefixStore, Result, Store, TcpStore, TcpStoreServer, deadline_in,
    split_address,
};

use crate::launcher::Environment;
use crate::one_host::{self, RemovedFile};
use crate::rounds;

/// How long the process that has the address of rank 0 may take to say whether it is one.
const ASK: Duration = Duration::from_secs(2);

/// One process among those of a job.
///
/// ```
/// use oxccl_world::Place;
///
/// let place = Place::from_url("tcp://127.0.0.1:29500?rank=1&world_size=4")?;
/// assert_eq!((place.rank, place.world_size), (1, 4));
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: u32,
    /// Its number among the ranks of its host, where that is known: the usual device index.
    pub local_rank: Option<u32>,
    /// Where the ranks meet.
    pub meeting: Meeting,
}

/// Where ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// Rank 0 listens there (`host:port`), the others connect.
    Tcp(String),
    /// Another program's store listens there (`host:port`) and may outlive this job's processes, such as that of torchrun's agent: all ranks
    /// connect, and those that live come together in it.
    Served(String),
    /// All ranks are on this host, below one process that started them: they meet in a file named after it.
    OneHost {
        /// Set in the environment of the ranks, and not in that of the process that started them.
        variable: &'static str,
    },
    /// A file on a file system that all ranks share.
    File(PathBuf),
}

impl Place {
    /// From the environment: the variables of torchrun, Open MPI, PALS, MPICH, Intel MPI or Slurm, whichever are there first.
    ///
    /// The ranks meet at `MASTER_ADDR` and `MASTER_PORT` (29500) if that is set: rank 0 listens there, or torchrun's agent does
    /// (`TORCHELASTIC_USE_AGENT_STORE`). Otherwise rank 0 listens on the first node of the Slurm step (its port comes from the job's and the
    /// step's number) or of `PBS_NODEFILE`, and an MPI job whose ranks are all on one host meets in a file there.
    ///
    /// Errors: `InvalidArgument` names the variable that is missing or is no number, and what was looked for.
    pub fn from_env() -> Result<Self> {
        let environment = Environment {
            variable: &|name| std::env::var(name).ok(),
            file: &|path| std::fs::read_to_string(path),
        };
        environment.place()
    }

    /// From an address: `env://` ([`from_env`](Self::from_env)), `tcp://HOST:PORT?rank=R&world_size=N` or
    /// `file:///PATH?rank=R&world_size=N`, and `local_rank` if you like. The file must not be left over from another run.
    ///
    /// Errors: `InvalidArgument` says which part is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::invalid(format!(
                "'{url}' is not a meeting place: {why}; known: env://, tcp://HOST:PORT?rank=R&world_size=N, file:///PATH?rank=R&world_size=N"
            ))
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("there is no '://'"))?;
        if scheme == "env" {
            return if rest.is_empty() {
                Self::from_env()
            } else {
                Err(wrong("nothing follows env://"))
            };
        }
        let (target, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut said = BTreeMap::new();
        for part in query.split('&').filter(|p| !p.is_empty()) {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| wrong(&format!("'{part}' is not NAME=VALUE")))?;
            if !["rank", "world_size", "local_rank"].contains(&name) {
                return Err(wrong(&format!("'{name}' is not known")));
            }
            let value: u32 = value
                .parse()
                .map_err(|_| wrong(&format!("{name} is '{value}', not a number")))?;
            if said.insert(name, value).is_some() {
                return Err(wrong(&format!("{name} is there twice")));
            }
        }
        let number = |name: &str| {
            said.get(name)
                .copied()
                .ok_or_else(|| wrong(&format!("{name} is missing")))
        };
        let meeting = match scheme {
            "tcp" => {
                if split_address(target).is_err() {
                    return Err(wrong("HOST:PORT is missing"));
                }
                Meeting::Tcp(target.to_string())
            }
            "file" if target.starts_with('/') => Meeting::File(target.into()),
            "file" => return Err(wrong("the path is not absolute")),
            other => return Err(wrong(&format!("'{other}' is not known"))),
        };
        Self {
            rank: number("rank")?,
            world_size: number("world_size")?,
            local_rank: said.get("local_rank").copied(),
            meeting,
        }
        .checked()
    }

    pub(crate) fn checked(self) -> Result<Self> {
        if self.rank < self.world_size {
            return Ok(self);
        }
        Err(Error::invalid(format!(
            "rank {} does not exist in a world of {}",
            self.rank, self.world_size
        )))
    }

    /// Opens the store at which the ranks meet. What comes with it must live as long as any rank needs the store.
    ///
    /// Errors: `Timeout` or `Unavailable` if nothing listens there before `deadline`; `Conflict` or `Io` if rank 0 cannot; `Conflict` if another
    /// process says that it is this rank; `Timeout` if the store is another program's and not all ranks come to it by then.
    pub fn open(&self, deadline: Instant) -> Result<(Arc<dyn Store>, Host)> {
        self.open_under(deadline, &Cancel::default())
    }

    /// [`open`](Self::open), whose wait for the other ranks `cancel` ends.
    pub(crate) fn open_under(&self, deadline: Instant, cancel: &Cancel) -> Result<(Arc<dyn Store>, Host)> {
        let mut host = Host::default();
        let store: Arc<dyn Store> = match &self.meeting {
            Meeting::Tcp(address) => {
                if self.rank == 0 {
                    host.server = Some(serve(address, deadline)?);
                }
                Arc::new(TcpStore::connect(address, deadline)?)
            }
            Meeting::Served(address) => {
                let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline)?);
                let ranks = (self.rank, self.world_size);
                let met = rounds::meet(&cancel.over(&store), ranks, address, deadline)?;
                return Ok((Arc::new(PrefixStore::new(store, met)), host));
            }
            Meeting::File(path) => Arc::new(FileStore::open(path)?),
            Meeting::OneHost { variable } => {
                let path = one_host::file(variable)?;
                let store = FileStore::open(&path)?;
                if self.rank == 0 {
                    host.file = Some(RemovedFile(path));
                }
                Arc::new(store)
            }
        };
        claim(&*store, self.rank, deadline)?;
        Ok((store, host))
    }
}

/// What rank 0 holds so that the others find the store: its server, or the file that goes with it. Nothing on other ranks.
#[derive(Debug, Default)]
pub struct Host {
    server: Option<TcpStoreServer>,
    file: Option<RemovedFile>,
}

/// Says that this process is `rank`. Two that say so are two processes with one number: the second one is told at once.
fn claim(store: &dyn Store, rank: u32, deadline: Instant) -> Result<()> {
    let me = me();
    let first = store.compare_set(&key(rank), b"", me.as_bytes(), deadline)?;
    if first == me.as_bytes() {
        return Ok(());
    }
    Err(claimed_twice(rank, &first, &me))
}

/// This process, unlike any other.
fn me() -> String {
    let system = rustix::system::uname();
    format!(
        "process {} on {} ({:016x})",
        std::process::id(),
        system.nodename().to_string_lossy(),
        ftcore::lifecycle::nonce()
    )
}

fn key(rank: u32) -> String {
    format!("rank/{rank}")
}

fn claimed_twice(rank: u32, first: &[u8], me: &str) -> Error {
    let first = String::from_utf8_lossy(first);
    let (first, _) = first.split_once(" (").unwrap_or((&first, ""));
    let (me, _) = me.split_once(" (").unwrap_or((me, ""));
    Error::new(
        ErrorKind::Conflict,
        format!(
            "rank {rank} is claimed twice: by {first}, and now by {me}; give each process a rank of its own, and each run a new meeting place"
        ),
    )
}

/// The store at which rank 0 meets the others. If the address is taken by another process that says that it is rank 0, that one is named.
fn serve(address: &str, deadline: Instant) -> Result<TcpStoreServer> {
    TcpStoreServer::bind(address).map_err(|taken| {
        if taken.kind() != ErrorKind::Conflict {
            return taken;
        }
        // Only read: it may be the store of another job, or no store at all.
        let soon = deadline.min(deadline_in(ASK));
        let first = TcpStore::connect(address, soon).and_then(|store| store.get(&key(0), soon));
        first.map_or(taken, |first| claimed_twice(0, &first, &me()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(address: &str) -> Meeting {
        Meeting::Tcp(address.to_string())
    }

    #[test]
    fn addresses_are_read_and_mistakes_in_them_named() {
        let place = Place::from_url("tcp://[::1]:4000?rank=1&world_size=2&local_rank=0").unwrap();
        assert_eq!((place.rank, place.local_rank), (1, Some(0)));
        assert_eq!(place.meeting, tcp("[::1]:4000"));
        let file = Place::from_url("file:///shared/run-7?rank=0&world_size=1").unwrap();
        assert_eq!(file.meeting, Meeting::File("/shared/run-7".into()));
        for (url, says) in [
            ("localhost:1", "no '://'"),
            ("udp://a:1?rank=0&world_size=1", "'udp' is not known"),
            ("tcp://a?rank=0&world_size=1", "HOST:PORT"),
            ("tcp://a:1?rank=0", "world_size is missing"),
            ("tcp://a:1?rank=0&world_size=1&size=3", "'size' is not known"),
            ("tcp://a:1?rank=0&rank=1&world_size=2", "rank is there twice"),
            ("file://x?rank=0&world_size=1", "not absolute"),
            ("env://x", "nothing follows"),
            ("tcp://a:1?rank=3&world_size=2", "rank 3 does not exist"),
        ] {
            let e = Place::from_url(url).unwrap_err();
            assert!(e.to_string().contains(says), "{url}: {e}");
        }
    }

    #[test]
    fn a_rank_that_two_processes_claim_is_named_at_once_with_both() {
        let folder = tempfile::tempdir().unwrap();
        let place = |rank| Place {
            rank,
            world_size: 2,
            local_rank: None,
            meeting: Meeting::File(folder.path().join("meeting")),
        };
        let soon = || ftcore::deadline_in(std::time::Duration::from_secs(10));
        let first = place(1).open(soon()).unwrap();
        place(0).open(soon()).unwrap();
        let e = place(1).open(soon()).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        let me = format!("process {} on ", std::process::id());
        assert_eq!(e.to_string().matches(&me).count(), 2, "{e}");
        assert!(e.to_string().contains("rank 1 is claimed twice"), "{e}");
        drop(first);
    }

    #[test]
    fn two_processes_that_both_listen_as_rank_0_are_named_and_a_stranger_at_the_address_is_not_taken_for_one()
    {
        let soon = || deadline_in(Duration::from_secs(10));
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        let place = Place::from_url(&format!("tcp://{address}?rank=0&world_size=2")).unwrap();
        let e = place.open(soon()).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        assert!(
            e.to_string().contains("in use") && !e.to_string().contains("claimed"),
            "{e}"
        );
        drop(free);
        let first = place.open(soon()).unwrap();
        let e = place.open(soon()).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        let me = format!("process {} on ", std::process::id());
        let text = e.to_string();
        assert!(
            text.contains("rank 0 is claimed twice") && text.matches(&me).count() == 2,
            "{text}"
        );
        drop(first);
    }

    /// One process under an agent whose store is `store`: it meets the others, and says which keys are its own.
    fn meets(store: &TcpStoreServer, rank: u32, world_size: u32) -> Result<Arc<dyn Store>> {
        let place = Place {
            rank,
            world_size,
            local_rank: None,
            meeting: Meeting::Served(store.local_addr().to_string()),
        };
        let soon = deadline_in(Duration::from_secs(60));
        place.open(soon).map(|(store, _)| store)
    }

    /// An attempt with these ranks, in the order in which they come: each finds what the others have left, and nothing else.
    fn attempt(store: &TcpStoreServer, ranks: &[u32], name: &str) {
        let soon = deadline_in(Duration::from_secs(60));
        std::thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || {
                    let own = meets(store, *rank, ranks.len() as u32).unwrap();
                    assert!(!own.check(&["before"], soon).unwrap(), "{name}, rank {rank}");
                    own.add("met", 1, soon).unwrap();
                    own.barrier("all", ranks.len() as u32, soon).unwrap();
                    assert_eq!(own.get("met", soon).unwrap(), ranks.len().to_string().as_bytes());
                    own.set("before", b"", soon).unwrap();
                });
            }
        });
    }

    #[test]
    fn under_one_store_each_attempt_meets_anew_whatever_its_size() {
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        for (name, ranks) in [
            ("first", &[0, 1][..]),
            ("again", &[1, 0]),
            ("larger", &[2, 0, 1]),
            ("alone", &[0]),
            ("last", &[0, 1]),
        ] {
            attempt(&store, ranks, name);
        }
    }

    #[test]
    fn ranks_that_wait_follow_the_rank_0_that_is_started_again() {
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let keys = PrefixStore::new(client(&store), "oxccl");
        let soon = deadline_in(Duration::from_secs(60));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| meets(&store, 0, 3));
            keys.wait(&["round-1/here/0"], soon).unwrap();
            let one = scope.spawn(|| meets(&store, 1, 3));
            keys.wait(&["round-1/here/1"], soon).unwrap();
            // Rank 0 is started again before rank 2 has come: its first process is told, and the others go on with the second.
            let second = scope.spawn(|| meets(&store, 0, 3));
            let e = first.join().unwrap().err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
            assert!(e.to_string().contains("rank 0 is claimed twice"), "{e}");
            let two = meets(&store, 2, 3).unwrap();
            two.set("from", b"2", soon).unwrap();
            for other in [one, second] {
                let own = other.join().unwrap().unwrap();
                assert_eq!(own.get("from", soon).unwrap(), b"2");
            }
        });
    }

    #[test]
    fn a_process_that_waits_takes_no_part_once_a_later_one_of_its_rank_has_come() {
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let keys = PrefixStore::new(client(&store), "oxccl");
        let soon = deadline_in(Duration::from_secs(60));
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| meets(&store, 0, 3));
            let old = scope.spawn(|| meets(&store, 1, 3));
            keys.wait(&["round-1/here/1"], soon).unwrap();
            let new = scope.spawn(|| meets(&store, 1, 3));
            let e = old.join().unwrap().err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
            assert!(e.to_string().contains("rank 1 is claimed twice"), "{e}");
            meets(&store, 2, 3).unwrap();
            for other in [zero, new] {
                other.join().unwrap().unwrap();
            }
        });
    }

    #[test]
    fn a_wait_for_ranks_that_do_not_come_ends_at_its_deadline_or_with_its_token() {
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let place = |rank| Place {
            rank,
            world_size: 2,
            local_rank: None,
            meeting: Meeting::Served(store.local_addr().to_string()),
        };
        for (rank, says) in [(0, "round-1/here/1"), (1, "round 1")] {
            let e = place(rank)
                .open(deadline_in(Duration::from_millis(100)))
                .err()
                .unwrap();
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            assert!(e.to_string().contains(says), "{e}");
        }
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let place = |rank| Place {
            meeting: Meeting::Served(store.local_addr().to_string()),
            ..place(rank)
        };
        for rank in [0, 1] {
            let cancel = Cancel::default();
            let long = deadline_in(Duration::from_secs(60));
            let e = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| place(rank).open_under(long, &cancel).err().unwrap());
                client(&store)
                    .wait(&[&format!("oxccl/came/{rank}")], long)
                    .unwrap();
                cancel.cancel(Error::new(ErrorKind::Aborted, "enough"));
                waiting.join().unwrap()
            });
            assert_eq!((e.kind(), e.message()), (ErrorKind::Aborted, "enough"));
        }
    }

    fn client(store: &TcpStoreServer) -> Arc<dyn Store> {
        let soon = deadline_in(Duration::from_secs(60));
        Arc::new(TcpStore::connect(&store.local_addr().to_string(), soon).unwrap())
    }
}
