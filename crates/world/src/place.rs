//! Which rank this process is and where the ranks meet: from what a launcher sets, or from an address.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{Error, FileStore, Result, Store, TcpStore, TcpStoreServer, join_address, split_address};

/// torchrun's default port.
const DEFAULT_PORT: u16 = 29500;

/// One process among those of a job.
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
    /// A file on a file system that all ranks share.
    File(PathBuf),
}

/// What one launcher sets.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
}

/// In the order in which they are asked. torchrun goes first, since it may itself run under one of the others.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        name: "MPICH and Intel MPI",
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
    },
];

/// What says where rank 0 listens, in this order.
const ADDRESSES: [&str; 2] = ["MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"];
const PORT: &str = "MASTER_PORT";

impl Place {
    /// From the environment: the variables of torchrun, Open MPI, MPICH, Intel MPI or Slurm, whichever are there first. Rank 0 listens at
    /// `MASTER_ADDR` (else Slurm's `SLURM_LAUNCH_NODE_IPADDR`) and `MASTER_PORT` (else 29500).
    ///
    /// Errors: as [`from_variables`](Self::from_variables).
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), with `variable` in the place of the environment.
    ///
    /// Errors: `InvalidArgument` names the variable that is missing or is no number, and what was looked for.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variable = |name: &str| {
            variable(name)
                .map(|v| v.trim().to_string())
                .filter(|v| !v.is_empty())
        };
        let Some(launcher) = LAUNCHERS.iter().find(|l| variable(l.rank).is_some()) else {
            let looked: Vec<String> = LAUNCHERS
                .iter()
                .map(|l| format!("{} ({})", l.rank, l.name))
                .collect();
            return Err(Error::invalid(format!(
                "no launcher says which rank this is: none of {} is set; use torchrun, mpirun or srun, or an address with rank and world size",
                looked.join(", ")
            )));
        };
        let number = |name: &str| -> Result<Option<u32>> {
            let Some(text) = variable(name) else {
                return Ok(None);
            };
            let number = text.parse();
            number.map(Some).map_err(|_| {
                Error::invalid(format!(
                    "{name} is '{text}', not a number (set by {})",
                    launcher.name
                ))
            })
        };
        let needed = |name: &str| {
            number(name)?.ok_or_else(|| {
                Error::invalid(format!(
                    "{} is set, but {name} is not ({})",
                    launcher.rank, launcher.name
                ))
            })
        };
        let host = ADDRESSES.iter().find_map(|name| variable(name)).ok_or_else(|| {
            Error::invalid(format!("where rank 0 listens is not known: set {}", ADDRESSES[0]))
        })?;
        let port = match variable(PORT) {
            None => DEFAULT_PORT,
            Some(text) => text
                .parse()
                .map_err(|_| Error::invalid(format!("{PORT} is '{text}', not a port")))?,
        };
        Self {
            rank: needed(launcher.rank)?,
            world_size: needed(launcher.world_size)?,
            local_rank: number(launcher.local_rank)?,
            meeting: Meeting::Tcp(join_address(&host, port)),
        }
        .checked()
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

    fn checked(self) -> Result<Self> {
        if self.rank < self.world_size {
            return Ok(self);
        }
        Err(Error::invalid(format!(
            "rank {} does not exist in a world of {}",
            self.rank, self.world_size
        )))
    }

    /// Opens the store at which the ranks meet; rank 0 of a TCP meeting also gets its server, which must live as long as any rank needs the
    /// store.
    ///
    /// Errors: `Timeout` or `Unavailable` if rank 0 does not listen before `deadline`; `Conflict` or `Io` if it cannot.
    pub fn open(&self, deadline: Instant) -> Result<(Arc<dyn Store>, Option<TcpStoreServer>)> {
        match &self.meeting {
            Meeting::Tcp(address) => {
                let server = match self.rank {
                    0 => Some(TcpStoreServer::bind(address)?),
                    _ => None,
                };
                Ok((Arc::new(TcpStore::connect(address, deadline)?), server))
            }
            Meeting::File(path) => Ok((Arc::new(FileStore::open(path)?), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Place> {
        Place::from_variables(|name| {
            let found = pairs.iter().find(|(n, _)| *n == name);
            found.map(|(_, v)| (*v).to_string())
        })
    }

    fn tcp(address: &str) -> Meeting {
        Meeting::Tcp(address.to_string())
    }

    #[test]
    fn every_launcher_is_understood_and_torchrun_goes_first() {
        let place = from(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node7"),
            ("MASTER_PORT", "4000"),
            ("SLURM_PROCID", "0"),
        ]);
        let wanted = Place {
            rank: 3,
            world_size: 8,
            local_rank: Some(1),
            meeting: tcp("node7:4000"),
        };
        assert_eq!(place.unwrap(), wanted);
        let ompi = from(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "fe80::1"),
        ]);
        assert_eq!(ompi.unwrap().meeting, tcp("[fe80::1]:29500"));
        let slurm = from(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "6"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
        ])
        .unwrap();
        assert_eq!((slurm.rank, slurm.local_rank), (5, Some(0)));
        assert_eq!(slurm.meeting, tcp("10.0.0.9:29500"));
        let mpich = from(&[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("MASTER_ADDR", "localhost")]).unwrap();
        assert_eq!(mpich.local_rank, None);
    }

    #[test]
    fn each_variable_of_a_launcher_is_read_and_no_other_is() {
        // The names as the launchers' manuals give them. A launcher's other variables have other numbers.
        for [rank, world_size, local_rank] in [
            ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
            ],
            ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
            ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
        ] {
            let others = [
                "GROUP_RANK",
                "ROLE_RANK",
                "OMPI_COMM_WORLD_NODE_RANK",
                "SLURM_NODEID",
            ];
            let pairs = [
                (rank, "5"),
                (world_size, "8"),
                (local_rank, "3"),
                ("MASTER_ADDR", "h"),
            ];
            let all: Vec<_> = others.map(|o| (o, "7")).into_iter().chain(pairs).collect();
            let place = from(&all).unwrap();
            let wanted = Place {
                rank: 5,
                world_size: 8,
                local_rank: Some(3),
                meeting: tcp("h:29500"),
            };
            assert_eq!(place, wanted, "{rank}");
            let e = from(&[(rank, "5"), ("MASTER_ADDR", "h")]).unwrap_err();
            assert!(e.to_string().contains(&format!("{world_size} is not")), "{e}");
            let e = from(&[pairs[0], pairs[1], (local_rank, "x"), pairs[3]]).unwrap_err();
            assert!(e.to_string().contains(&format!("{local_rank} is 'x'")), "{e}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        for (pairs, says) in [
            (&[][..], "RANK (torchrun)"),
            (&[("RANK", "0")], "set MASTER_ADDR"),
            (&[("RANK", "0"), ("MASTER_ADDR", "a")], "WORLD_SIZE is not"),
            (&[("RANK", "x"), ("MASTER_ADDR", "a")], "RANK is 'x'"),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
                "rank 2 does not exist",
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "1"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "99999"),
                ],
                "MASTER_PORT is '99999'",
            ),
        ] {
            let e = from(pairs).unwrap_err();
            assert!(e.to_string().contains(says), "{pairs:?}: {e}");
        }
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
}
