//! What launchers say: which rank this process is, and where the ranks meet. Variables in, a [`Place`] out; nothing is opened here.

use std::path::Path;

use ftcore::{Error, Result, join_address};

use crate::place::{Meeting, Place};

/// torchrun's default port.
const DEFAULT_PORT: u16 = 29500;
/// Where rank 0 listens, from whichever launcher or user.
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
const LOOPBACK: &str = "127.0.0.1";

/// What one launcher sets.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first that is set counts.
    world_size: &'static [&'static str],
    local_rank: &'static str,
    /// The number of ranks on this host; not every launcher says so.
    local_size: Option<&'static str>,
    /// Where the ranks meet if [`ADDRESS`] is not set.
    meeting: Unsaid,
}

/// What stands in for [`ADDRESS`].
#[derive(Clone, Copy)]
enum Unsaid {
    /// Nothing.
    Nothing,
    /// A file, if all ranks are on one host.
    OneHost,
    /// The first node of the step, whose port the job's number gives.
    SlurmNodes,
    /// The first node of the job's list of nodes.
    PbsNodes,
}

/// In the order in which they are asked. torchrun goes first, since it may itself run under one of the others.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: None,
        meeting: Unsaid::Nothing,
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        meeting: Unsaid::OneHost,
    },
    // Aurora's launcher also sets PMI variables.
    Launcher {
        name: "PALS",
        rank: "PALS_RANKID",
        world_size: &["PALS_SIZE", "PMI_SIZE"],
        local_rank: "PALS_LOCAL_RANKID",
        local_size: Some("PALS_LOCAL_SIZE"),
        meeting: Unsaid::PbsNodes,
    },
    Launcher {
        name: "MPICH and Intel MPI",
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: Some("MPI_LOCALNRANKS"),
        meeting: Unsaid::OneHost,
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_size: None,
        meeting: Unsaid::SlurmNodes,
    },
];

/// The variables of one process, and the files that they name.
pub(crate) struct Environment<'a> {
    pub(crate) variable: &'a dyn Fn(&str) -> Option<String>,
    pub(crate) file: &'a dyn Fn(&Path) -> std::io::Result<String>,
}

impl Environment<'_> {
    /// `None` if it is not set or blank.
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name)
            .map(|v| v.trim().to_string())
            .filter(|v| !v.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<u32>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let number = text.parse();
        number
            .map(Some)
            .map_err(|_| Error::invalid(format!("{name} is '{text}', not a number")))
    }

    /// The place that the first launcher found here gives to this process.
    ///
    /// Errors: `InvalidArgument` names the variable that is missing or wrong, and what was looked for.
    pub(crate) fn place(&self) -> Result<Place> {
        let Some(launcher) = LAUNCHERS.iter().find(|l| self.text(l.rank).is_some()) else {
            let looked: Vec<String> = LAUNCHERS
                .iter()
                .map(|l| format!("{} ({})", l.rank, l.name))
                .collect();
            return Err(Error::invalid(format!(
                "no launcher says which rank this is: none of {} is set; start it with torchrun, mpirun, srun or `oxccl launch`, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand",
                looked.join(", ")
            )));
        };
        self.given_by(launcher)
            .map_err(|e| Error::invalid(format!("{} ({})", e.message(), launcher.name)))
    }

    fn given_by(&self, launcher: &Launcher) -> Result<Place> {
        let missing = |name: &str| Error::invalid(format!("{} is set, but {name} is not", launcher.rank));
        let rank = self
            .number(launcher.rank)?
            .ok_or_else(|| missing(launcher.rank))?;
        let local_size = launcher
            .local_size
            .map(|name| self.number(name))
            .transpose()?
            .flatten();
        let world_size = match self.first_number(launcher.world_size)? {
            Some(size) => size,
            None => self
                .counted_on_nodes(launcher, local_size)?
                .ok_or_else(|| missing(launcher.world_size.first().copied().unwrap_or_default()))?,
        };
        Place {
            rank,
            world_size,
            local_rank: self.number(launcher.local_rank)?,
            meeting: self.meeting(launcher, world_size, local_size)?,
        }
        .checked()
    }

    fn first_number(&self, names: &[&str]) -> Result<Option<u32>> {
        let found = names.iter().find(|name| self.text(name).is_some());
        found.map_or(Ok(None), |name| self.number(name))
    }

    /// PALS may leave out the number of ranks: as many on each node as on this one.
    fn counted_on_nodes(&self, launcher: &Launcher, local_size: Option<u32>) -> Result<Option<u32>> {
        let (Unsaid::PbsNodes, Some(local)) = (launcher.meeting, local_size) else {
            return Ok(None);
        };
        let nodes = u32::try_from(self.pbs_nodes()?.len()).ok();
        Ok(nodes.and_then(|nodes| nodes.checked_mul(local)))
    }

    fn meeting(&self, launcher: &Launcher, world_size: u32, local_size: Option<u32>) -> Result<Meeting> {
        let port = match self.text(PORT) {
            None => None,
            Some(text) => Some(
                text.parse()
                    .map_err(|_| Error::invalid(format!("{PORT} is '{text}', not a port")))?,
            ),
        };
        let at = |host: &str, otherwise: u16| join_address(host, port.unwrap_or(otherwise));
        if let Some(host) = self.text(ADDRESS) {
            let address = at(&host, DEFAULT_PORT);
            // torchrun's agent has a store there already, which outlives the processes that it starts again.
            let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
            if launcher.name == "torchrun" && agent.is_some_and(|v| v.eq_ignore_ascii_case("true")) {
                return Ok(Meeting::Served(address));
            }
            return Ok(Meeting::Tcp(address));
        }
        let unknown = || Error::invalid(format!("where rank 0 listens is not known: set {ADDRESS}"));
        let on_one_host = local_size == Some(world_size);
        match launcher.meeting {
            Unsaid::OneHost if on_one_host => Ok(Meeting::OneHost {
                variable: launcher.rank,
            }),
            Unsaid::PbsNodes if on_one_host => Ok(Meeting::Tcp(at(LOOPBACK, DEFAULT_PORT))),
            Unsaid::Nothing | Unsaid::OneHost => Err(unknown()),
            Unsaid::PbsNodes => {
                let first = self.pbs_nodes()?.into_iter().next().ok_or_else(unknown)?;
                Ok(Meeting::Tcp(at(&first, DEFAULT_PORT)))
            }
            Unsaid::SlurmNodes if world_size > 1 && self.text("SLURM_STEP_ID").is_none() => {
                Err(Error::invalid(
                    "SLURM_STEP_ID is not set: this process is the batch script's, not one of srun's; begin the command with srun",
                ))
            }
            Unsaid::SlurmNodes => {
                let port = self.slurm_port()?;
                if self.first_number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])? == Some(1) {
                    return Ok(Meeting::Tcp(at(LOOPBACK, port)));
                }
                let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
                let (name, list) = lists
                    .iter()
                    .find_map(|name| self.text(name).map(|list| (name, list)))
                    .ok_or_else(unknown)?;
                let first = first_node(&list).ok_or_else(|| {
                    Error::invalid(format!("{name} is '{list}', not a list of nodes such as n[1-4]"))
                })?;
                Ok(Meeting::Tcp(at(&first, port)))
            }
        }
    }

    /// A port of the step's own, since steps of several jobs may share a node: from 20000 to 29999, below the system's own choices.
    fn slurm_port(&self) -> Result<u16> {
        let job = self.number("SLURM_JOB_ID")?.unwrap_or(0);
        let step = self.number("SLURM_STEP_ID")?.unwrap_or(0);
        let mixed = u64::from(job) * 7 + u64::from(step);
        Ok(20_000 + u16::try_from(mixed % 10_000).unwrap_or(0))
    }

    /// The nodes of `PBS_NODEFILE`, in its order, each once.
    fn pbs_nodes(&self) -> Result<Vec<String>> {
        let Some(path) = self.text("PBS_NODEFILE") else {
            return Ok(Vec::new());
        };
        let text = (self.file)(Path::new(&path))
            .map_err(|e| Error::invalid(format!("PBS_NODEFILE: cannot read {path}: {e}")))?;
        let mut nodes: Vec<String> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if !nodes.iter().any(|node| node == line) {
                nodes.push(line.to_string());
            }
        }
        Ok(nodes)
    }
}

/// The first node of a list as Slurm writes it: `n7`, `n[1-4,9]`, `r[02-03]n[1-8],login1`.
fn first_node(list: &str) -> Option<String> {
    let mut node = String::new();
    let mut rest = list;
    loop {
        let at = rest.find(['[', ',']).unwrap_or(rest.len());
        let (plain, next) = rest.split_at_checked(at)?;
        node.push_str(plain);
        let Some(inside) = next.strip_prefix('[') else {
            break;
        };
        let (numbers, after) = inside.split_once(']')?;
        let first = numbers.split(['-', ',']).next()?;
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        node.push_str(first);
        rest = after;
    }
    (!node.is_empty() && !node.contains([']', ' '])).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Place> {
        let variable = |name: &str| {
            let found = pairs.iter().find(|(n, _)| *n == name);
            found.map(|(_, v)| (*v).to_string())
        };
        let file = |path: &Path| match path.to_str() {
            Some("/pbs/nodes") => Ok("x7.hsn\nx7.hsn\n\nx9.hsn\n".to_string()),
            _ => Err(std::io::Error::from(std::io::ErrorKind::NotFound)),
        };
        let environment = Environment {
            variable: &variable,
            file: &file,
        };
        environment.place()
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
            ["PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"],
            ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
            ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
        ] {
            let others = [
                "GROUP_RANK",
                "ROLE_RANK",
                "OMPI_COMM_WORLD_NODE_RANK",
                "SLURM_NODEID",
                "SLURM_NTASKS",
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
    fn under_torchruns_agent_all_ranks_are_clients_of_its_store_whatever_its_count_of_attempts() {
        let torchrun = |more: &[(&'static str, &'static str)]| {
            let pairs = [
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "h"),
                ("MASTER_PORT", "7"),
            ];
            from(&[&pairs, more].concat())
        };
        let served = Meeting::Served("h:7".to_string());
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
        assert_eq!(torchrun(&[agent]).unwrap().meeting, served);
        let again = torchrun(&[agent, ("TORCHELASTIC_RESTART_COUNT", "2")]).unwrap();
        assert_eq!(again.meeting, served);
        let off = torchrun(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).unwrap();
        assert_eq!(off.meeting, tcp("h:7"));
    }

    #[test]
    fn under_slurm_rank_0_is_on_the_first_node_of_the_step_and_not_where_srun_was_called() {
        let slurm = |more: &[(&'static str, &'static str)]| {
            let pairs = [
                ("SLURM_PROCID", "5"),
                ("SLURM_NTASKS", "6"),
                ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
                ("SLURM_JOB_ID", "1234"),
                ("SLURM_STEP_ID", "2"),
            ];
            from(&[&pairs, more].concat())
        };
        let job = ("SLURM_JOB_NODELIST", "n[01-04]");
        assert_eq!(slurm(&[job]).unwrap().meeting, tcp("n01:28640"));
        let step = slurm(&[job, ("SLURM_STEP_NODELIST", "n[03-04]")]).unwrap();
        assert_eq!(step.meeting, tcp("n03:28640"));
        let alone = slurm(&[job, ("SLURM_NNODES", "4"), ("SLURM_STEP_NUM_NODES", "1")]).unwrap();
        assert_eq!(alone.meeting, tcp("127.0.0.1:28640"));
        let said = slurm(&[job, ("MASTER_PORT", "4000")]).unwrap();
        assert_eq!(said.meeting, tcp("n01:4000"));
        let e = slurm(&[("SLURM_JOB_NODELIST", "n[")]).unwrap_err();
        assert!(e.to_string().contains("SLURM_JOB_NODELIST is 'n['"), "{e}");
        let e = slurm(&[]).unwrap_err();
        assert!(e.to_string().contains("set MASTER_ADDR"), "{e}");
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), job];
        let e = from(&batch).unwrap_err();
        assert!(e.to_string().contains("begin the command with srun"), "{e}");
    }

    #[test]
    fn the_first_node_of_a_list_is_found_in_every_form() {
        for (list, first) in [
            ("n7", "n7"),
            ("n7,n8", "n7"),
            ("n[1-4]", "n1"),
            ("n[04,09-12],x3", "n04"),
            ("r[02-03]n[1-8].local,x", "r02n1.local"),
            ("gpu-[001]", "gpu-001"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", ",n1", "n[", "n[]", "n[a-b]", "n]", "n 1"] {
            assert_eq!(first_node(list), None, "{list}");
        }
    }

    #[test]
    fn under_pals_the_size_and_the_first_node_come_from_the_list_of_nodes() {
        let pals = [
            ("PALS_RANKID", "3"),
            ("PALS_LOCAL_RANKID", "1"),
            ("PALS_LOCAL_SIZE", "2"),
            ("PBS_NODEFILE", "/pbs/nodes"),
        ];
        let wanted = Place {
            rank: 3,
            world_size: 4,
            local_rank: Some(1),
            meeting: tcp("x7.hsn:29500"),
        };
        assert_eq!(from(&pals).unwrap(), wanted);
        let said = from(&[&pals[..], &[("PMI_SIZE", "6"), ("PMI_RANK", "0")]].concat()).unwrap();
        assert_eq!((said.rank, said.world_size), (3, 6));
        let e = from(&[pals[0], pals[2], ("PBS_NODEFILE", "/gone")]).unwrap_err();
        assert!(e.to_string().contains("PBS_NODEFILE: cannot read /gone"), "{e}");
        let one = from(&[pals[2], ("PALS_RANKID", "1"), ("PALS_SIZE", "2")]).unwrap();
        assert_eq!(one.meeting, tcp("127.0.0.1:29500"));
    }

    #[test]
    fn an_mpi_job_on_one_host_needs_no_address() {
        for [rank, size, local_size] in [
            [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ],
            ["PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"],
        ] {
            let here = from(&[(rank, "1"), (size, "4"), (local_size, "4")]).unwrap();
            assert!(matches!(here.meeting, Meeting::OneHost { variable } if variable == rank));
            let e = from(&[(rank, "1"), (size, "4"), (local_size, "2")]).unwrap_err();
            assert!(e.to_string().contains("set MASTER_ADDR"), "{e}");
            let said = from(&[(rank, "1"), (size, "4"), (local_size, "4"), ("MASTER_ADDR", "h")]).unwrap();
            assert_eq!(said.meeting, tcp("h:29500"));
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        for (pairs, says) in [
            (&[][..], "RANK (torchrun)"),
            (&[("RANK", "0"), ("WORLD_SIZE", "1")], "set MASTER_ADDR"),
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
}
