//! What a supervised process is told through its environment, and the one thing that a lighthouse tells back.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use ftcore::{Error, Result, time_left};

use super::events::{LighthouseReady, Message};

/// The lighthouse's address, `http://host:port`.
pub const ENV_LIGHTHOUSE: &str = "OXCCL_LIGHTHOUSE";
/// The replica's index in the job, from 0.
pub const ENV_REPLICA: &str = "OXCCL_REPLICA";
/// How many replicas the job has, on all machines together.
pub const ENV_REPLICAS: &str = "OXCCL_REPLICAS";
/// Which incarnation of the replica this process is: 0, and one more after each restart.
pub const ENV_INCARNATION: &str = "OXCCL_INCARNATION";
/// This process's rank inside its replica, from 0.
pub const ENV_RANK: &str = "OXCCL_RANK";
/// How many ranks, and so processes, each replica has.
pub const ENV_RANKS: &str = "OXCCL_RANKS";
/// Where the ranks of a replica meet: `host:port` of a store that serves this incarnation of the replica alone.
pub const ENV_REPLICA_STORE: &str = "OXCCL_REPLICA_STORE";
/// The path of the Unix socket that events are written to.
pub const ENV_EVENTS: &str = "OXCCL_EVENTS";

/// A replica's place in the job, as its supervisor set it.
///
/// ```
/// use oxccl::launch::ReplicaEnv;
///
/// // `ReplicaEnv::from_env()` reads what `oxccl launch` has set; any other source of variables does as well.
/// let place = ReplicaEnv::from_lookup(|name| match name {
///     "OXCCL_LIGHTHOUSE" => Some("http://127.0.0.1:29510".into()),
///     "OXCCL_REPLICA" => Some("0".into()),
///     "OXCCL_REPLICAS" => Some("2".into()),
///     _ => None,
/// })?;
/// assert_eq!((place.replica, place.replicas, place.rank, place.ranks), (0, 2, 0, 1));
/// // With a lighthouse there, `place.join()?` is the replica to train with.
/// # Ok::<(), oxccl::core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaEnv {
    /// The lighthouse's address, `http://host:port`.
    pub lighthouse: String,
    /// This replica's index, less than `replicas`.
    pub replica: u32,
    /// How many replicas the job has.
    pub replicas: u32,
    /// Which incarnation of the replica this is.
    pub incarnation: u32,
    /// This process's rank inside the replica, less than `ranks`.
    pub rank: u32,
    /// How many ranks the replica has.
    pub ranks: u32,
    /// The store in which the ranks of the replica meet; always there if there are several.
    pub store: Option<String>,
}

impl ReplicaEnv {
    /// Reads it from the environment. A variable that is missing or no number is `InvalidArgument` naming it.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// The same from any source of variables.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| {
            get(name).filter(|v| !v.is_empty()).ok_or_else(|| {
                Error::invalid(format!(
                    "{name} is not set; start this program with `oxccl launch … -- PROGRAM`, which sets it"
                ))
            })
        };
        let number = |name: &str| {
            let value = text(name)?;
            value
                .parse::<u32>()
                .map_err(|_| Error::invalid(format!("{name} must be a whole number from 0, not \"{value}\"")))
        };
        let number_or = |name: &str, absent: u32| {
            if get(name).is_some() {
                number(name)
            } else {
                Ok(absent)
            }
        };
        let this = Self {
            lighthouse: text(ENV_LIGHTHOUSE)?,
            replica: number(ENV_REPLICA)?,
            replicas: number(ENV_REPLICAS)?,
            incarnation: number_or(ENV_INCARNATION, 0)?,
            rank: number_or(ENV_RANK, 0)?,
            ranks: number_or(ENV_RANKS, 1)?,
            store: get(ENV_REPLICA_STORE).filter(|v| !v.is_empty()),
        };
        if this.rank >= this.ranks {
            return Err(Error::invalid(format!(
                "{ENV_RANK}={} must be less than {ENV_RANKS}={}",
                this.rank, this.ranks
            )));
        }
        if this.ranks > 1 {
            // Without it the ranks could not find each other.
            text(ENV_REPLICA_STORE)?;
        }
        if this.replica >= this.replicas {
            return Err(Error::invalid(format!(
                "{ENV_REPLICA}={} must be less than {ENV_REPLICAS}={}",
                this.replica, this.replicas
            )));
        }
        Ok(this)
    }
}

/// Tells the supervisor that started this lighthouse that it now listens at `url`. Does nothing without `OXCCL_EVENTS`
/// (a lighthouse started by hand). Fails with `Io` if the supervisor's socket cannot be written to by `deadline`.
pub fn announce_lighthouse(url: &str, deadline: Instant) -> Result<()> {
    let Some(path) = std::env::var_os(ENV_EVENTS) else {
        return Ok(());
    };
    let what = || {
        format!(
            "tell the supervisor at {} the lighthouse's address",
            path.display()
        )
    };
    let ready = LighthouseReady {
        url: url.to_owned(),
        pid: std::process::id(),
    };
    let line = Message::Lighthouse {
        lighthouse_ready: ready,
    }
    .to_line()?;
    let mut stream = UnixStream::connect(&path).map_err(|e| Error::io(what(), e))?;
    // A zero time-out is an error of its own; one millisecond past the deadline does no harm.
    let left = time_left(deadline).max(std::time::Duration::from_millis(1));
    stream
        .set_write_timeout(Some(left))
        .map_err(|e| Error::io(what(), e))?;
    stream
        .write_all(line.as_bytes())
        .map_err(|e| Error::io(what(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<ReplicaEnv> {
        ReplicaEnv::from_lookup(|name| {
            pairs
                .iter()
                .find(|(k, _)| *k == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn a_complete_environment_is_read_and_the_first_incarnation_may_be_left_out() {
        let base = [
            (ENV_LIGHTHOUSE, "http://h:1"),
            (ENV_REPLICA, "1"),
            (ENV_REPLICAS, "2"),
        ];
        let env = from(&base).unwrap();
        assert_eq!(
            env,
            ReplicaEnv {
                lighthouse: "http://h:1".into(),
                replica: 1,
                replicas: 2,
                incarnation: 0,
                rank: 0,
                ranks: 1,
                store: None,
            }
        );
        let env = from(&[base[0], base[1], base[2], (ENV_INCARNATION, "3")]).unwrap();
        assert_eq!(env.incarnation, 3);
        let store = (ENV_REPLICA_STORE, "127.0.0.1:5");
        let env = from(&[
            base[0],
            base[1],
            base[2],
            (ENV_RANK, "1"),
            (ENV_RANKS, "2"),
            store,
        ])
        .unwrap();
        assert_eq!(
            (env.rank, env.ranks, env.store.as_deref()),
            (1, 2, Some("127.0.0.1:5"))
        );
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let l = (ENV_LIGHTHOUSE, "http://h:1");
        for (pairs, named) in [
            (vec![(ENV_REPLICA, "0"), (ENV_REPLICAS, "1")], ENV_LIGHTHOUSE),
            (vec![l, (ENV_REPLICAS, "1")], ENV_REPLICA),
            (vec![l, (ENV_REPLICA, "first"), (ENV_REPLICAS, "1")], "\"first\""),
            (vec![l, (ENV_REPLICA, "0"), (ENV_REPLICAS, "-1")], "\"-1\""),
            (vec![l, (ENV_REPLICA, "2"), (ENV_REPLICAS, "2")], "less than"),
            (
                vec![l, (ENV_REPLICA, "0"), (ENV_REPLICAS, "2"), (ENV_INCARNATION, "")],
                ENV_INCARNATION,
            ),
            (
                vec![l, (ENV_REPLICA, "0"), (ENV_REPLICAS, "2"), (ENV_RANK, "1")],
                "OXCCL_RANK=1 must be less than OXCCL_RANKS=1",
            ),
            (
                vec![l, (ENV_REPLICA, "0"), (ENV_REPLICAS, "2"), (ENV_RANKS, "2")],
                ENV_REPLICA_STORE,
            ),
        ] {
            let e = from(&pairs).unwrap_err();
            assert!(e.to_string().contains(named), "{e}");
        }
    }
}
