//! Process ranks that live through many cases: this very binary, started again and told the names of cases on its standard
//! input; verdicts come back through the store, since libraries print to standard output.

use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::process::{ChildStdin, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Device, Store, TcpStore, TcpStoreServer, deadline_in};

use crate::case::MakeOn;
use crate::credentials::credentials;
use crate::failure::verdict;
use crate::harness::{LASTING, TIME_LIMIT, command, server, store_of_parent, variable};
use crate::lasting::{Member, Ranks};
use crate::running::Running;
use crate::suite::named;
use crate::{Case, Failure, Outcome};

/// How long the parent waits for a verdict before it looks whether the process still lives.
const LOOK: Duration = Duration::from_millis(100);
/// What ranks get to end after the last case.
const END: Duration = Duration::from_secs(30);

/// A rank's process, and what it reads.
struct Living {
    running: Running,
    orders: Option<ChildStdin>,
}

/// Ranks as processes that live on.
pub(crate) struct Processes {
    world: u32,
    ranks: Vec<Living>,
    verdicts: TcpStore,
    served: u64,
    /// Holds the store; goes last.
    _server: TcpStoreServer,
}

impl Processes {
    pub(crate) fn start(world: u32, again: &[OsString]) -> Outcome<Self> {
        let server = server()?;
        let ranks = (0..world)
            .map(|rank| {
                let mut command = command(again, LASTING, rank, world, &server)?;
                command.stdin(Stdio::piped());
                let mut running = Running::start(rank, command)?;
                let orders = running.child.stdin.take();
                Ok(Living { running, orders })
            })
            .collect::<Outcome<_>>()?;
        let address = format!("127.0.0.1:{}", server.port());
        Ok(Self {
            world,
            ranks,
            verdicts: TcpStore::connect_with(&address, Some(credentials()?), deadline_in(END))?,
            served: 0,
            _server: server,
        })
    }
}

impl Ranks for Processes {
    fn world(&self) -> u32 {
        self.world
    }

    fn run(&mut self, case: &Case) -> Outcome {
        self.served += 1;
        for living in &mut self.ranks {
            if let Some(orders) = &mut living.orders {
                // One that has died is reported below, with its status.
                let _ = writeln!(orders, "{} {}", self.served, case.name);
            }
        }
        let until = deadline_in(TIME_LIMIT);
        let failures = self.ranks.iter_mut().filter_map(|living| {
            let key = key(self.served, living.running.rank);
            let failure = living.verdict(&self.verdicts, &key, until)?;
            Some(format!("rank {}: {failure}", living.running.rank))
        });
        verdict(failures.collect())
    }

    fn end(mut self) -> Outcome {
        for living in &mut self.ranks {
            living.orders = None;
        }
        let until = deadline_in(END);
        let failures = self.ranks.iter_mut().filter_map(|living| {
            let failure = match living.running.wait(until) {
                Ok(status) if status.success() => return None,
                Ok(status) => status.to_string(),
                Err(why) => why,
            };
            let rank = living.running.rank;
            Some(format!(
                "after the last case of world {}, rank {rank}: {}",
                self.world,
                living.running.said(failure)
            ))
        });
        verdict(failures.collect())
    }
}

impl Living {
    /// `None` if the case passed on this rank.
    fn verdict(&mut self, verdicts: &TcpStore, key: &str, until: Instant) -> Option<String> {
        loop {
            match verdicts.get(key, deadline_in(LOOK)) {
                Ok(text) if text.is_empty() => return None,
                Ok(text) => return Some(String::from_utf8_lossy(&text).into_owned()),
                // Our own store: on a slow machine it may not even be reached within one look.
                Err(e) if e.is_retryable() => {}
                Err(e) => return Some(format!("no verdict: {e}")),
            }
            match self.running.child.try_wait() {
                Ok(Some(status)) => return Some(self.running.said(status)),
                Ok(None) if Instant::now() >= until => {
                    let seconds = TIME_LIMIT.as_secs();
                    return Some(self.running.said(format_args!("no verdict within {seconds} s")));
                }
                Ok(None) => {}
                Err(e) => return Some(format!("cannot be waited for: {e}")),
            }
        }
    }
}

/// Where a rank's verdict of its `number`th case is found.
fn key(number: u64, rank: u32) -> String {
    format!("verdict/{number}/{rank}")
}

/// The rank's side: joins the group, then runs what it is told to until its standard input is closed.
pub(crate) fn serve(first: &Device, make: &MakeOn) -> Outcome {
    let (rank, world, store) = (variable::rank()?, variable::world()?, store_of_parent()?);
    let store: Arc<dyn Store> = Arc::new(store);
    let mut member = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| Failure::new(format!("the parent cannot be heard: {e}")))?;
        let (number, name) = line
            .split_once(' ')
            .and_then(|(number, name)| Some((number.parse::<u64>().ok()?, name)))
            .ok_or_else(|| Failure::new(format!("'{line}' is no order")))?;
        let case = named(name).ok_or_else(|| Failure::new(format!("there is no case '{name}'")))?;
        let outcome = match &member {
            Some(member) => Ok(member),
            None => Member::join(rank, world, first, make, store.clone()).map(|m| &*member.insert(m)),
        }
        .and_then(|member| member.run(&case, number));
        let text = outcome.err().map(|f| f.to_string()).unwrap_or_default();
        store.set(&key(number, rank), text.as_bytes(), deadline_in(END))?;
    }
    member.map_or(Ok(()), |m| m.leave())
}
