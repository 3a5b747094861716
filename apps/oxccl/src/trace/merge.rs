//! Where the records of a job's ranks first differ (pure).
//!
//! The collectives of a group have the same numbers on all ranks, so the records are laid side by side by (group, prefix, epoch, number) and walked
//! from the first number that all of them still have. The first that is not the same everywhere, or has not ended everywhere, is what the job hangs
//! or fails at; what comes after it in the same group is its consequence. Messages are matched by (sender, receiver, tag) in their order.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::record::{Operation, Record, State};

/// An operation that is younger than this in its record may end by itself, and a record that is older by this may only be behind.
const MOMENT_NS: u64 = 1_000_000_000;

/// What kind of thing was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Ranks entered different operations under one number.
    Mismatch,
    /// A rank has not come to an operation that others wait in.
    NotEntered,
    /// There is no record of a rank that others wait for.
    NoRecord,
    /// A rank came to an operation after it had failed elsewhere.
    TooLate,
    /// All ranks came to an operation, and it failed.
    Failed,
    /// All ranks came to an operation, and it does not end.
    Unfinished,
    /// A send without its receive, a receive without its send, or two that differ.
    Message,
    /// Everything agrees; one rank kept the others waiting.
    Late,
}

/// What was found in one configuration of one group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// One sentence.
    pub(crate) text: String,
    pub(crate) group: String,
    pub(crate) epoch: u64,
    /// The number of the operation, where it is one.
    pub(crate) seq: Option<u64>,
    /// The ranks of the group that differ, are missing or late.
    pub(crate) ranks: Vec<u32>,
    /// When the first rank came there, in nanoseconds since 1970.
    pub(crate) at_ns: u64,
    /// False if all ranks of which there is a record have been configured anew since.
    pub(crate) present: bool,
}

/// All that was found, the first divergence first.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Verdict {
    /// Something differs, failed or does not end in a present configuration.
    pub(crate) diverged: bool,
    /// One sentence.
    pub(crate) text: String,
    pub(crate) findings: Vec<Finding>,
}

/// One rank of one configuration, as its process recorded it.
struct Member<'a> {
    collectives: BTreeMap<u64, &'a Operation>,
    messages: Vec<&'a Operation>,
    refused: Option<&'a Operation>,
    /// The first collective that the ring still has; earlier ones are not known. Messages are known if it is 0.
    known_from: u64,
    present: bool,
    written_ns: u64,
}

/// One configuration of one group over all records.
pub(crate) struct Epoch<'a> {
    pub(crate) group: &'a str,
    pub(crate) epoch: u64,
    pub(crate) world: u32,
    members: BTreeMap<u32, Member<'a>>,
}

impl<'a> Member<'a> {
    fn of(record: &'a Record, group: &'a super::record::Group, epoch: u64) -> Self {
        let oldest = group.operations.first().map_or(u64::MAX, |o| o.epoch);
        let ours = || group.operations.iter().filter(|o| o.epoch == epoch);
        let accepted = || ours().filter(|o| o.state != State::Refused);
        let collectives: BTreeMap<_, _> = accepted()
            .filter(|o| !o.is_message())
            .map(|o| (o.seq, o))
            .collect();
        let complete = group.overwritten == 0 || oldest < epoch;
        Self {
            known_from: match (complete, collectives.first_key_value()) {
                (true, _) => 0,
                (false, Some((first, _))) => (*first).max(1),
                (false, None) => u64::MAX,
            },
            collectives,
            messages: accepted().filter(|o| o.is_message()).collect(),
            refused: ours().find(|o| o.state == State::Refused),
            present: group.configurations.last().is_some_and(|c| c.epoch == epoch),
            written_ns: record.written_ns,
        }
    }

    /// How much it has to tell; of two records of one rank, the one with more counts.
    fn weight(&self) -> (usize, u64) {
        (self.collectives.len() + self.messages.len(), self.written_ns)
    }

    fn last(&self) -> String {
        match self.collectives.last_key_value() {
            None => "it entered none before".to_string(),
            Some((seq, op)) if matches!(op.state, State::Queued | State::Running) => {
                format!("its last was {} #{seq}, which has not ended there", op.op)
            }
            Some((seq, op)) => format!("its last was {} #{seq}", op.op),
        }
    }
}

/// The configurations of all groups in `records`.
pub(crate) fn epochs(records: &[Record]) -> Vec<Epoch<'_>> {
    let mut epochs: BTreeMap<(&str, &str, u64), Epoch<'_>> = BTreeMap::new();
    for record in records {
        for group in &record.groups {
            for c in &group.configurations {
                let epoch = epochs
                    .entry((&c.name, &c.prefix, c.epoch))
                    .or_insert_with(|| Epoch {
                        group: &c.name,
                        epoch: c.epoch,
                        world: c.world,
                        members: BTreeMap::new(),
                    });
                let member = Member::of(record, group, c.epoch);
                match epoch.members.get_mut(&c.rank) {
                    Some(other) if other.weight() >= member.weight() => {}
                    Some(other) => *other = member,
                    None => drop(epoch.members.insert(c.rank, member)),
                }
            }
        }
    }
    epochs.into_values().collect()
}

fn ranks_text(ranks: &[u32]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        [first @ .., last] if first.len() < 8 => {
            let first: Vec<String> = first.iter().map(u32::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [first, ..] => format!("{} ranks, the first of them {first},", ranks.len()),
        [] => "no rank".to_string(),
    }
}

fn seconds(ns: u64) -> String {
    let s = ns as f64 / 1e9;
    if s < 10.0 {
        format!("{s:.1} s")
    } else {
        format!("{s:.0} s")
    }
}

/// What all ranks must have the same.
type Signature<'a> = (
    &'a str,
    Option<u32>,
    Option<&'a str>,
    Option<u64>,
    Option<&'a str>,
    Option<u32>,
    Option<&'a str>,
);

fn signature(op: &Operation) -> Signature<'_> {
    (
        &op.op,
        op.root,
        op.dtype.as_deref(),
        op.agreed,
        op.reduce.as_deref(),
        op.tensors,
        op.parts.as_deref(),
    )
}

/// In what `odd` differs from what the others have: (its own, theirs).
fn difference(odd: &Operation, usual: &Operation) -> (String, String) {
    let number = |n: Option<u64>| format!("{} elements", n.unwrap_or(0));
    let text = |what: &str, t: Option<&str>| format!("{what}{}", t.unwrap_or("none"));
    let root = |r: Option<u32>| r.map_or("no root".to_string(), |r| format!("root {r}"));
    if odd.root != usual.root {
        (root(odd.root), root(usual.root))
    } else if odd.dtype != usual.dtype {
        let dtype = |o: &Operation| text("dtype ", o.dtype.as_deref());
        (dtype(odd), dtype(usual))
    } else if odd.agreed != usual.agreed {
        (number(odd.agreed), number(usual.agreed))
    } else if odd.reduce != usual.reduce {
        let reduce = |o: &Operation| text("reduction ", o.reduce.as_deref());
        (reduce(odd), reduce(usual))
    } else if odd.tensors != usual.tensors {
        let tensors = |o: &Operation| format!("{} tensors", o.tensors.unwrap_or(0));
        (tensors(odd), tensors(usual))
    } else {
        (
            "other counts tensor by tensor".to_string(),
            "their own".to_string(),
        )
    }
}

impl Epoch<'_> {
    /// The ranks of which there is a record.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = u32> {
        self.members.keys().copied()
    }

    /// The last collective that any rank entered.
    pub(crate) fn last_seq(&self) -> Option<u64> {
        let last = self
            .members
            .values()
            .filter_map(|m| m.collectives.last_key_value());
        last.map(|(seq, _)| *seq).max()
    }

    /// True if some rank has not been configured anew since.
    pub(crate) fn is_present(&self) -> bool {
        self.members.values().any(|m| m.present)
    }

    fn name(&self) -> String {
        format!("group {} (epoch {})", self.group, self.epoch)
    }

    fn finding(&self, kind: Kind, seq: Option<u64>, ranks: Vec<u32>, at_ns: u64, text: String) -> Finding {
        Finding {
            kind,
            text,
            group: self.group.to_string(),
            epoch: self.epoch,
            seq,
            ranks,
            at_ns,
            present: self.is_present(),
        }
    }

    /// The first divergence of the collectives, that of the messages, and the longest wait for one rank.
    pub(crate) fn findings(&self, late_ns: u64) -> Vec<Finding> {
        let (first, late) = self.collectives(late_ns);
        first.into_iter().chain(self.messages()).chain(late).collect()
    }

    /// Ranks without a record.
    fn gone(&self) -> Vec<u32> {
        // A world as large as a damaged file claims would take long to list.
        let world = self.world.min(1 << 20);
        (0..world)
            .filter(|rank| !self.members.contains_key(rank))
            .collect()
    }

    fn collectives(&self, late_ns: u64) -> (Option<Finding>, Option<Finding>) {
        let all: BTreeSet<u64> = self
            .members
            .values()
            .flat_map(|m| m.collectives.keys().copied())
            .collect();
        let gone = self.gone();
        let mut latest: Option<(u64, u64, u32)> = None;
        for seq in all {
            let known = || self.members.iter().filter(|(_, m)| m.known_from <= seq);
            let entered: Vec<(u32, &Operation)> = known()
                .filter_map(|(rank, m)| Some((*rank, *m.collectives.get(&seq)?)))
                .collect();
            let absent: Vec<(u32, &Member<'_>)> = known()
                .filter(|(_, m)| !m.collectives.contains_key(&seq))
                .map(|(rank, m)| (*rank, m))
                .collect();
            if let Some(found) = self.mismatch(seq, &entered) {
                return (Some(found), None);
            }
            if let Some(found) = self.incomplete(seq, &entered, &absent, &gone) {
                return (Some(found), None);
            }
            if entered.iter().any(|(_, op)| op.state != State::Done) {
                break;
            }
            if let Some((wait, rank)) = last_to_come(&entered).filter(|(wait, _)| *wait >= late_ns)
                && latest.is_none_or(|(longest, ..)| wait > longest)
            {
                latest = Some((wait, seq, rank));
            }
        }
        let first = self.failed_between(&gone);
        let late = latest.and_then(|(wait, seq, rank)| {
            let op = self.members.get(&rank)?.collectives.get(&seq)?;
            let text = format!(
                "rank {rank} came to {} #{seq} of {} {} after the others",
                op.op,
                self.name(),
                seconds(wait)
            );
            Some(self.finding(Kind::Late, Some(seq), vec![rank], op.submitted_ns, text))
        });
        (first, late)
    }

    /// Ranks that entered something else than the others.
    fn mismatch(&self, seq: u64, entered: &[(u32, &Operation)]) -> Option<Finding> {
        let mut kinds: Vec<Vec<(u32, &Operation)>> = Vec::new();
        for (rank, op) in entered {
            let alike = |kind: &&mut Vec<(u32, &Operation)>| {
                kind.first()
                    .is_some_and(|(_, first)| signature(first) == signature(op))
            };
            match kinds.iter_mut().find(alike) {
                Some(kind) => kind.push((*rank, op)),
                None => kinds.push(vec![(*rank, op)]),
            }
        }
        // Stable: of kinds of one size, the one with the lowest rank is taken for the usual one.
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.len()));
        let [usual, odd, ..] = kinds.as_slice() else {
            return None;
        };
        let (&(_, usual_op), &(_, odd_op)) = (usual.first()?, odd.first()?);
        let those = |kind: &[(u32, &Operation)]| kind.iter().map(|(rank, _)| *rank).collect::<Vec<u32>>();
        let (who, others) = (those(odd), those(usual));
        // Where as many ranks have one as the other, neither is the odd one.
        let (theirs, ranks) = match others.len() == who.len() {
            true => (ranks_text(&others), [&others[..], &who[..]].concat()),
            false if kinds.len() == 2 => ("the others".to_string(), who.clone()),
            false => ("most others".to_string(), who.clone()),
        };
        let text = if odd_op.op == usual_op.op {
            let (own, usual) = difference(odd_op, usual_op);
            format!(
                "{} entered {} #{seq} of {} with {own}, {theirs} with {usual}",
                ranks_text(&who),
                odd_op.op,
                self.name()
            )
        } else {
            format!(
                "{} entered {} as #{seq} of {}, where {theirs} entered {}",
                ranks_text(&who),
                odd_op.described(),
                self.name(),
                usual_op.described()
            )
        };
        Some(self.finding(Kind::Mismatch, Some(seq), ranks, first_to_come(entered), text))
    }

    /// A collective that all who came to it agree on, and that has not ended everywhere.
    fn incomplete(
        &self,
        seq: u64,
        entered: &[(u32, &Operation)],
        absent: &[(u32, &Member<'_>)],
        gone: &[u32],
    ) -> Option<Finding> {
        let (_, usual) = entered.first()?;
        let at = first_to_come(entered);
        let what = format!("{} #{seq} of {}", usual.op, self.name());
        let failed = entered
            .iter()
            .filter(|(_, op)| op.state == State::Failed)
            .min_by_key(|(_, op)| op.ended_ns.unwrap_or(u64::MAX));
        let ends = entered.iter().all(|(_, op)| op.state == State::Done);
        let reason = match failed {
            Some((rank, op)) => format!(
                "; on rank {rank} it failed: {}",
                op.reason.as_deref().unwrap_or("no reason is kept")
            ),
            None => String::new(),
        };
        // A refusal is a rank that came, when the group had failed.
        let (refused, never): (Vec<_>, Vec<_>) = absent.iter().partition(|(_, m)| m.refused.is_some());
        let behind = |m: &Member<'_>| failed.is_none() && m.written_ns < at.saturating_add(MOMENT_NS);
        let done = entered
            .iter()
            .filter_map(|(_, op)| op.ended_ns)
            .max()
            .unwrap_or(at);
        let never: Vec<_> = never
            .into_iter()
            .filter(|(_, m)| !behind(m) && (!ends || m.written_ns > done.saturating_add(MOMENT_NS)))
            .collect();
        if !gone.is_empty() && !ends {
            let text = format!(
                "there is no record of {}, which the others wait for in {what}: its process may have ended{reason}",
                ranks_text(gone)
            );
            return Some(self.finding(Kind::NoRecord, Some(seq), gone.to_vec(), at, text));
        }
        if let [(_, first), rest @ ..] = never.as_slice() {
            let ranks: Vec<u32> = never.iter().map(|(rank, _)| *rank).collect();
            let last = match rest {
                [] => first.last(),
                _ => format!("of rank {}, {}", ranks.first()?, first.last()),
            };
            let text = format!("{} never entered {what}; {last}{reason}", ranks_text(&ranks));
            return Some(self.finding(Kind::NotEntered, Some(seq), ranks, at, text));
        }
        if ends || !absent.is_empty() && refused.is_empty() {
            return None;
        }
        let failed_at = failed.and_then(|(_, op)| op.ended_ns);
        let came_late = entered
            .iter()
            .map(|(rank, op)| (*rank, op.submitted_ns))
            .filter(|(_, at)| failed_at.is_some_and(|failed| *at > failed));
        // Refused: late whatever the clocks say. A rank may hear of the failure before the one that failed has noted the end.
        let came_refused = refused
            .iter()
            .filter_map(|(rank, m)| Some((*rank, m.refused?.submitted_ns)));
        let after: Vec<(u32, u64)> = came_late.chain(came_refused).collect();
        if let Some((rank, came)) = after.iter().min_by_key(|(_, at)| *at) {
            let ranks: Vec<u32> = after.iter().map(|(rank, _)| *rank).collect();
            let text = format!(
                "rank {rank} came to {what} {} after the first rank, when it had failed{reason}",
                seconds(came.saturating_sub(at))
            );
            return Some(self.finding(Kind::TooLate, Some(seq), ranks, at, text));
        }
        if let Some((rank, _)) = failed {
            let text = format!("all ranks came to {what}{reason}");
            return Some(self.finding(Kind::Failed, Some(seq), vec![*rank], at, text));
        }
        let open: Vec<u32> = entered
            .iter()
            .filter(|(rank, op)| {
                let written = self.members.get(rank).map_or(0, |m| m.written_ns);
                op.state != State::Done && written > op.submitted_ns.saturating_add(MOMENT_NS)
            })
            .map(|(rank, _)| *rank)
            .collect();
        if open.is_empty() {
            return None;
        }
        let text = format!(
            "all ranks came to {what}, and it has not ended on {}",
            ranks_text(&open)
        );
        Some(self.finding(Kind::Unfinished, Some(seq), open, at, text))
    }

    /// All collectives that were entered have ended, and the group failed after them.
    fn failed_between(&self, gone: &[u32]) -> Option<Finding> {
        let (rank, op) = self
            .members
            .iter()
            .filter_map(|(rank, m)| Some((*rank, m.refused?)))
            .min_by_key(|(_, op)| op.submitted_ns)?;
        let reason = op.reason.as_deref().unwrap_or("no reason is kept");
        let last = self
            .last_seq()
            .map_or("before its first collective".to_string(), |seq| {
                format!("after #{seq}")
            });
        let (kind, ranks, text) = match gone {
            [] => (
                Kind::Failed,
                vec![rank],
                format!("{} failed {last}; rank {rank} was told: {reason}", self.name()),
            ),
            gone => (
                Kind::NoRecord,
                gone.to_vec(),
                format!(
                    "there is no record of {}, and {} failed {last}; rank {rank} was told: {reason}",
                    ranks_text(gone),
                    self.name()
                ),
            ),
        };
        Some(self.finding(kind, None, ranks, op.submitted_ns, text))
    }

    /// The first message that has no other end, or another one.
    fn messages(&self) -> Option<Finding> {
        let mut ways: BTreeMap<(u32, u32, u32), [Vec<&Operation>; 2]> = BTreeMap::new();
        // The parts of a batch are not recorded one by one, nor whom a receive from any rank met.
        let clear = |m: &Member<'_>| {
            m.known_from == 0 && m.messages.iter().all(|o| o.op != "batch" && o.peer.is_some())
        };
        for (rank, member) in self.members.iter().filter(|(_, m)| clear(m)) {
            for op in &member.messages {
                let Some(peer) = op.peer.filter(|p| self.members.get(p).is_some_and(clear)) else {
                    continue;
                };
                let tag = op.tag.unwrap_or(0);
                let (way, end) = match op.op.as_str() {
                    "send" => ((*rank, peer, tag), 0),
                    _ => ((peer, *rank, tag), 1),
                };
                if let Some(list) = ways.entry(way).or_default().get_mut(end) {
                    list.push(op);
                }
            }
        }
        let found = ways
            .iter()
            .filter_map(|(way, [sends, receives])| self.message(*way, sends, receives));
        found.min_by_key(|f| f.at_ns)
    }

    fn message(
        &self,
        (from, to, tag): (u32, u32, u32),
        sends: &[&Operation],
        receives: &[&Operation],
    ) -> Option<Finding> {
        let tagged = if tag == 0 {
            String::new()
        } else {
            format!(" with tag {tag}")
        };
        let name = |n: usize| {
            format!(
                "message {} from rank {from} to rank {to}{tagged} in {}",
                n + 1,
                self.name()
            )
        };
        for (n, (send, receive)) in sends.iter().zip(receives).enumerate() {
            if (send.input, &send.dtype) != (receive.output, &receive.dtype) {
                let text = format!(
                    "{} is sent as {} and received as {}",
                    name(n),
                    send.described(),
                    receive.described()
                );
                let at = send.submitted_ns.min(receive.submitted_ns);
                return Some(self.finding(Kind::Message, None, vec![from, to], at, text));
            }
        }
        let n = sends.len().min(receives.len());
        let (left, own, other, text) = match (sends.get(n), receives.get(n)) {
            (Some(send), _) => (send, from, to, "was sent, and never received"),
            (_, Some(receive)) => (receive, to, from, "is waited for, and was never sent"),
            (None, None) => return None,
        };
        let here = self.members.get(&own)?.written_ns;
        let there = self.members.get(&other)?.written_ns;
        let since = left.submitted_ns.saturating_add(MOMENT_NS);
        let open = match left.state {
            State::Failed => true,
            State::Queued | State::Running => here > since && there > since,
            State::Done | State::Refused => false,
        };
        let text = format!("{} {text}", name(n));
        open.then(|| self.finding(Kind::Message, None, vec![other], left.submitted_ns, text))
    }
}

fn first_to_come(entered: &[(u32, &Operation)]) -> u64 {
    entered.iter().map(|(_, op)| op.submitted_ns).min().unwrap_or(0)
}

/// How long the last rank came after the last but one, and which it is.
fn last_to_come(entered: &[(u32, &Operation)]) -> Option<(u64, u32)> {
    let mut came: Vec<(u64, u32)> = entered
        .iter()
        .map(|(rank, op)| (op.submitted_ns, *rank))
        .collect();
    came.sort_unstable();
    let [.., (before, _), (last, rank)] = came.as_slice() else {
        return None;
    };
    Some((last - before, *rank))
}

/// Compares the records. `late_ns`: how long a rank may come after the others before that is worth a word.
pub(crate) fn merge(records: &[Record], late_ns: u64) -> Verdict {
    let epochs = epochs(records);
    let mut findings: Vec<Finding> = epochs.iter().flat_map(|e| e.findings(late_ns)).collect();
    // What stands now before what is over, divergences before mere lateness, and of these the first: later ones may be its consequences.
    findings.sort_by_key(|f| (!f.present, f.kind == Kind::Late, f.at_ns));
    let first = findings.first().filter(|f| f.present);
    let diverged = first.is_some_and(|f| f.kind != Kind::Late);
    let text = match first {
        Some(found) => found.text.clone(),
        None if epochs.is_empty() => "the records have no group".to_string(),
        None => "the records agree: nothing differs, failed or does not end".to_string(),
    };
    Verdict {
        diverged,
        text,
        findings,
    }
}
