//! One entry of a run over its incarnations: the lighthouse, or a replica with a process for each of its ranks.
//!
//! An incarnation of a replica begins with all its ranks and ends with all of them: when one fails, the others are ended, and the next
//! incarnation starts them all again. What the entry knows is here; `control` acts on it.

use std::process::Child;
use std::time::{Duration, Instant};

use ftcore::TcpStoreServer;
use rustix::process::Signal;

use super::outcome::ExitSummary;

/// How long the other ranks of a replica get to end by themselves after SIGTERM, once one of them has failed.
pub(super) const RANK_GRACE: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Who {
    Lighthouse,
    Replica(u32),
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lighthouse => f.write_str("lighthouse"),
            Self::Replica(replica) => write!(f, "replica {replica}"),
        }
    }
}

/// The process of one rank in the present incarnation.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) child: Option<Child>,
    pub(super) exit: Option<ExitSummary>,
    /// The end of its output, unless it exited with 0.
    pub(super) tail: String,
}

/// A rank that failed. The least of an incarnation's is the cause of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Failure {
    /// It came to an end by itself, as one does whose peer is gone, or by our signal.
    may_follow: bool,
    /// When its end was seen: by a thread of its own, which may be woken later than that of a rank that ended after it.
    t_us: u64,
    rank: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Slot {
    /// By rank; the lighthouse has one process.
    pub(super) ranks: Vec<Process>,
    /// Where the ranks of this incarnation meet; the lighthouse has none.
    pub(super) store: Option<TcpStoreServer>,
    pub(super) incarnations: u32,
    /// Short incarnations in a row, for the pause before the next.
    pub(super) in_a_row: u32,
    pub(super) started: Instant,
    pub(super) next_start: Option<Instant>,
    /// The rank whose end was the cause of the others'.
    pub(super) failed: Option<Failure>,
    /// The signals that were sent to the ranks of this incarnation.
    pub(super) sent: Vec<i32>,
    /// When the ranks that outlived it are killed.
    pub(super) kill_at: Option<Instant>,
    /// It will not be started again.
    pub(super) over: bool,
    /// That is because it failed once too often.
    pub(super) gave_up: bool,
}

impl Slot {
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            ranks: (0..ranks).map(|_| Process::default()).collect(),
            store: None,
            incarnations: 0,
            in_a_row: 0,
            started: Instant::now(),
            next_start: None,
            failed: None,
            sent: Vec::new(),
            kill_at: None,
            over: false,
            gave_up: false,
        }
    }

    pub(super) fn rank(&self, rank: u32) -> Option<&Process> {
        self.ranks.get(usize::try_from(rank).ok()?)
    }

    pub(super) fn rank_mut(&mut self, rank: u32) -> Option<&mut Process> {
        self.ranks.get_mut(usize::try_from(rank).ok()?)
    }

    /// The ranks whose processes have not been collected.
    pub(super) fn running(&self) -> impl Iterator<Item = (u32, &Child)> {
        (0..)
            .zip(&self.ranks)
            .filter_map(|(rank, process)| Some((rank, process.child.as_ref()?)))
    }

    pub(super) fn is_running(&self) -> bool {
        self.running().next().is_some()
    }

    /// A new incarnation, in which no process has been started yet. Returns its number.
    pub(super) fn begin(&mut self) -> u32 {
        let incarnation = self.incarnations;
        self.incarnations += 1;
        self.next_start = None;
        self.kill_at = None;
        self.failed = None;
        self.sent.clear();
        self.started = Instant::now();
        self.store = None;
        for process in &mut self.ranks {
            *process = Process::default();
        }
        incarnation
    }

    /// `rank` has failed.
    pub(super) fn fail(&mut self, rank: u32, exit: ExitSummary, t_us: u64) {
        // No peer's end brings these about; a program that gives up may abort, and one that writes to a dead peer gets SIGPIPE.
        let from_outside = |signal: i32| {
            ![Signal::ABORT, Signal::PIPE]
                .map(Signal::as_raw)
                .contains(&signal)
        };
        let is_ours = |signal: i32| self.sent.contains(&signal);
        let this = Failure {
            may_follow: !exit.signal.is_some_and(|s| from_outside(s) && !is_ours(s)),
            t_us,
            rank,
        };
        self.failed = Some(self.failed.map_or(this, |first| first.min(this)));
    }

    /// The rank that brought the others' end about: the one that ended with a code that no restart cures, else the one whose failure was not
    /// caused by another's. `None` as long as none has failed.
    pub(super) fn cause(&self, fatal_codes: &[i32]) -> Option<u32> {
        let is_fatal = |p: &Process| {
            let code = p.exit.and_then(|exit| exit.status);
            code.is_some_and(|code| fatal_codes.contains(&code))
        };
        let fatal = (0..).zip(&self.ranks).find(|(_, process)| is_fatal(process));
        fatal.map(|(rank, _)| rank).or_else(|| Some(self.failed?.rank))
    }

    /// How the incarnation ended and the end of its output: of the rank that was the cause, else of the first.
    pub(super) fn end(&self, fatal_codes: &[i32]) -> (Option<ExitSummary>, String) {
        let process = self.rank(self.cause(fatal_codes).unwrap_or(0));
        process.map_or((None, String::new()), |p| (p.exit, p.tail.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_ends_as_the_rank_did_that_caused_its_end() {
        let mut slot = Slot::new(3);
        assert_eq!(slot.end(&[2]), (None, String::new()));
        let ended = |slot: &mut Slot, rank: u32, status, signal, tail: &str| {
            *slot.rank_mut(rank).unwrap() = Process {
                child: None,
                exit: Some(ExitSummary { status, signal }),
                tail: tail.into(),
            };
        };
        ended(&mut slot, 0, Some(0), None, "");
        ended(&mut slot, 1, None, Some(9), "first");
        ended(&mut slot, 2, Some(1), None, "lost rank 1");
        // Rank 2 exits since rank 1 was killed, and the thread that waits for it is woken first.
        let exit = |slot: &Slot, rank: u32| slot.rank(rank).unwrap().exit.unwrap();
        slot.fail(2, exit(&slot, 2), 4);
        assert_eq!(slot.end(&[2]).1, "lost rank 1");
        slot.fail(1, exit(&slot, 1), 5);
        assert_eq!(slot.end(&[2]).1, "first");
        // Had we killed it, it would have been for rank 2's failure.
        slot.failed = None;
        slot.sent = vec![15, 9];
        slot.fail(2, exit(&slot, 2), 4);
        slot.fail(1, exit(&slot, 1), 5);
        assert_eq!(slot.end(&[2]).1, "lost rank 1");
        // What no restart cures is the cause, also if another rank noticed first.
        ended(&mut slot, 2, Some(2), None, "no cure");
        assert_eq!(slot.end(&[2]).1, "no cure");
        slot.begin();
        assert_eq!(
            (slot.incarnations, slot.failed, slot.sent.len(), slot.end(&[2]).0),
            (1, None, 0, None)
        );
    }
}
