//! `cargo xtask faults`: takes each cure out of a copy of the sources, and tells which seed of a simulation, or which test, finds the fault again. So
//! does it with faults of one line elsewhere, each for a row of the matrix or a package's tests: what the usual run leaves to `--long` must not be what found
//! them.
//!
//! The table holds the lines of each cure and what stands there without it. A line that is no longer there, or there twice, is an error: then the table is
//! to be brought up to date. The copy lies in `target/xtask/faults`; the working tree is not touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output};

/// Options of `cargo xtask faults`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only those with this text in their names; may be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Seeds of the joint simulation for each fault.
    #[arg(long, value_name = "FROM..TO", default_value = "0..5000")]
    seeds: String,
    /// Seeds of the simulated network for each fault.
    #[arg(long, value_name = "FROM..TO", default_value = "0..300")]
    network_seeds: String,
}

/// What finds a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The joint simulation.
    Joint,
    /// Its runs with deaths right after a commit.
    Deaths,
    /// The simulated network.
    Network,
    /// Tests that `cargo test --package` runs with these words.
    Tests(&'static str),
    /// A row of the matrix as it usually is, not of `--long`.
    Row(&'static str),
}
use By::{Deaths, Joint, Network, Row, Tests};

impl By {
    fn told(self) -> &'static str {
        match self {
            Joint => "the simulation",
            Deaths => "the simulation (deaths after commits)",
            Network => "the simulated network",
            Tests(_) => "a test",
            Row(name) => name,
        }
    }
}

/// A cure that is taken out: what is seen without it, and for each place the file, the lines there (without their indentation) and what takes their place.
type Fault = (
    &'static str,
    By,
    &'static [(&'static str, &'static str, &'static str)],
);

const PROTOCOL: &str = "crates/protocol/src";
const NETWORK: &str = "crates/coordination/src";

#[rustfmt::skip]
const FAULTS: &[Fault] = &[
    ("1 malformed fields of a joiner", Joint, &[("quorum/arrivals.rs", "let checked = fields::check(&member).and_then(|()| self.check(&id, member.last_quorum_id, now));", "let checked = self.check(&id, member.last_quorum_id, now);")]),
    ("1 a peer's error ends one's own run", Joint, &[("rank.rs", "if !is_permanent(&error) {", "if true {")]),
    ("2 a dead rank", Joint, &[("replica.rs", "self.gone(rank, \"its process ended\", &mut actions);", "")]),
    ("2 a hung rank", Joint, &[("replica.rs", "&& since(p.progress) >= limit", "&& since(p.progress) >= limit * 1000"), ("replica.rs", "let stuck = p.progress.filter(|_| idle);", "let stuck = p.progress.filter(|_| false && idle);")]),
    ("2 signs of life while out", Joint, &[("replica.rs", "self.over.is_some() || !self.stalled.is_empty()", "false")]),
    ("3 `min_replicas` counts contributors", Joint, &[("rank.rs", "let members = answer.replica_world_size;", "let members = answer.contributor_world_size;")]),
    ("3 the source of an initial sync takes no lineage", Joint, &[("rank.rs", "if initial && !answer.heal {", "if false && initial {")]),
    ("4 a copy weighs in", Joint, &[("assignment.rs", "if let Some(place) = places.get_mut(i).filter(|_| !any || own_work(i)) {", "if let Some(place) = places.get_mut(i) {")]),
    ("5 stale gradients", Joint, &[("training/steps.rs", "pub fn loaded(&mut self, outcome: Result<()>) -> Result<()> {\nself.kept = None;", "pub fn loaded(&mut self, outcome: Result<()>) -> Result<()> {")]),
    ("5 a failed `apply` goes on", Joint, &[("training/integrity.rs", "self.torn.get_or_insert_with(|| e.clone());", "let _ = (e, &mut self.torn);")]),
    ("5 a load that failed in the middle", Joint, &[("training/rounds.rs", "self.integrity\n.record(outcome)\n.or_else(|_| self.integrity.check())?;", "outcome?;"), ("training/steps.rs", "self.integrity.record(outcome).or_else(|_| self.integrity.check())", "outcome")]),
    ("5 a spare asks again with a state written in part", Joint, &[("rank.rs", "(Err(e), _) if is_permanent(&e) || e.kind() == ErrorKind::InvalidState => Next::End(e),", "(Err(e), _) if is_permanent(&e) => Next::End(e),")]),
    ("6 a survivor loses its step", Deaths, &[("ends.rs", "self.why_over(live).filter(|_| is_in_hand).map(|_| GRACE)", "self.why_over(live).filter(|_| is_in_hand).map(|_| Duration::ZERO)")]),
    ("7 a larger step wins", Joint, &[("quorum/record.rs", "if member.step <= self.step {", "if true {")]),
    ("7 a restarted lighthouse does not know how far its epoch had come", Tests("oxccl-protocol --lib -- who_committed"), &[("crates/protocol/src/quorum/record.rs", "let goes_on = job.moves_to(step, lineage.as_ref());", "let goes_on = job.epoch == epoch && job.moves_to(step, lineage.as_ref());")]),
    ("7 a restarted lighthouse takes whom it sees first", Joint, &[("quorum/verdict.rs", "} else if self.lacks_of_last(now).is_some() {", "} else if false {")]),
    ("7 the healthy that do not ask are no majority", Joint, &[("quorum/verdict.rs", "} else if n * 2 <= self.electorate() {", "} else if false {")]),
    ("7 strangers that attach are healthy", Joint, &[("quorum/arrivals.rs", "if (entry.member && !entry.failed && !entry.left && last > Epoch(0))", "if true")]),
    ("7 an absurd quorum id", Joint, &[("quorum/arrivals.rs", "if last_quorum_id > self.quorum_id.max(possible) {", "if false {")]),
    ("7 an id of another job", Joint, &[("quorum/arrivals.rs", "if self.job.is_some() && last_quorum_id > self.quorum_id {", "if false {")]),
    ("8 `join_timeout` from the first asker", Joint, &[("quorum/forming.rs", "_ => None,", "Verdict::Idle => None,\n_ => Some(self.able_since.unwrap_or(now)),")]),
    ("8 replicas that beat and have not asked", Joint, &[("quorum/verdict.rs", "} else if ((tally.healthy == tally.asking && (overlaps || tally.coming == 0))", "} else if (tally.healthy == tally.asking")]),
    ("9 the break of torchft's connections is no evidence", Joint, &[("quorum.rs", "self.depart(&replica_id, \"its connections broke\", actions);", "")]),
    ("10 an epoch that goes back", Joint, &[("rank.rs", "let trouble = if id < newest {", "let trouble = if false {")]),
    ("13 who is far behind is a member at once", Joint, &[("quorum/spares.rs", "member.joining == Joining::Outside && frontier.is_some_and(|step| member.step < step)", "false && member.joining == Joining::Outside && frontier.is_some()")]),
    ("13 a state comes from one source", Joint, &[("assignment.rs", "pub const MAX_SOURCES: usize = 3;", "pub const MAX_SOURCES: usize = 1;")]),
    ("a lost vote brings no new epoch", Joint, &[("quorum/forming.rs", "|| participants.iter().any(|m| m.commit_failures > 0)", "")]),
    ("an answer that was lost is not given again", Joint, &[("gather.rs", "request.question != 0 && self.open.is_empty() && answered.get(&rank) == Some(&request.question)", "false && answered.get(&rank) == Some(&request.question)")]),
    ("ranks of different states ask as one", Joint, &[("gather.rs", "is_torn |= request.step != r.step || request.lineage != r.lineage;", "")]),
    ("a vote on a rank's own step, which waits", Joint, &[("rank.rs", "step: self.answer.as_ref().map_or(self.step, |a| a.max_step),", "step: self.step,"), ("replica.rs", "self.end_hopeless_votes(now, &mut actions);", "")]),
    ("a no that does not count", Joint, &[("commit.rs", "let commit = votes.values().all(|v| v.vote);", "let commit = votes.values().any(|v| v.vote);")]),
    ("a rank whose epoch did not come up leaves the others to compute", Joint, &[("rank.rs", "let place = answer.contributor_rank.filter(|&r| r < most && !answer.heal);", "let place = answer.contributor_rank.filter(|&r| r < most && !answer.heal && self.lost.is_none());")]),
    ("a step advances before its state", Joint, &[("rank.rs", "self.is_to_heal = answer.heal;", "self.is_to_heal = answer.heal;\nself.step = answer.max_step;")]),
    ("a rank that holds nothing tells a count of batches", Tests("oxccl-protocol --lib -- holds_nothing"), &[("crates/protocol/src/rank.rs", "batches_committed: if holds_nothing { 0 } else { self.batches },", "batches_committed: self.batches,")]),
    ("7 a member recorded as gone is not heard", Tests("oxccl-protocol --lib -- recorded_as_gone"), &[("crates/protocol/src/quorum/arrivals.rs", "} else if !entry.is_some_and(|e| e.member && !e.gone_before)", "} else if !entry.is_some_and(|e| e.member)")]),
    ("7 the record is not read at a restart", Network, &[("lighthouse/mod.rs", "record,\naccept_rollback: std::mem::take(&mut self.accept_rollback),", "record: record.filter(|_| false),\naccept_rollback: std::mem::take(&mut self.accept_rollback),")]),
    ("7 a quorum is delivered although the disk is full", Network, &[("lighthouse/actor.rs", "Err(error) => self.put_off(&tickets, &quorum, &error),", "Err(_) => self.deliver(&tickets, &quorum),")]),
    ("a call is not taken back at the lighthouse", Network, &[("lighthouse/service.rs", "if !self.is_answered {", "if false && !self.is_answered {")]),
    ("a call is not taken back at the manager server", Network, &[("manager/service.rs", "self.manager.tell(ReplicaEvent::Withdraw { ticket: self.ticket });", "")]),
    ("a call is not taken back from one server to the other", Network, &[("manager/actor.rs", "task.abort();", "drop(task);")]),
    ("an event stream is not opened again", Network, &[("manager/uplink.rs", "tokio::time::sleep(search.next()).await;", "return;")]),
    ("a watch stream is not opened again", Network, &[("client/manager.rs", "tokio::time::sleep(backoff.next()).await;", "return;")]),
    ("a connection that answers no ping stays", Network, &[("serve/activity.rs", "Err(why) => return Verdict::Goes(why),", "Err(_) => soon,")]),
    ("a client sends no pings", Network, &[("channel.rs", ".http2_keep_alive_interval(PING_INTERVAL)", "")]),
    ("gloo, ring: a part lands in its neighbour's place", Row("gloo-tcp-threads"), &[("crates/backend-gloo/src/schedule/ring.rs", "into: out(down(rank, k + 1, world)),", "into: out(down(rank, k, world)),")]),
    ("gloo, all-to-all: the part of the rank that is received from", Row("gloo-tcp-threads"), &[("crates/backend-gloo/src/schedule/linear.rs", "from: Span::new(Buffer::In, part(input, to)),", "from: Span::new(Buffer::In, part(input, from)),")]),
    ("gloo, gather: the root's parts are shifted", Row("gloo-shm-processes"), &[("crates/backend-gloo/src/schedule/linear.rs", "into: Span::new(Buffer::Out, part(parts, peer)),", "into: Span::new(Buffer::Out, part(parts, up(peer, 1, world))),")]),
    ("gloo, scatter: the root's parts are shifted", Row("gloo-tcp-processes"), &[("crates/backend-gloo/src/schedule/linear.rs", "from: Span::new(Buffer::In, part(parts, peer)),", "from: Span::new(Buffer::In, part(parts, up(peer, 1, world))),")]),
    ("strangers: who has credentials is not told that the other end has none", Tests("backend-gloo --test gloo -- credentials"), &[("crates/ftcore/src/identity/strangers.rs", "let _ = self.caller.write(&hello::refusal(Reason::NoCredentials));", "let _ = hello::refusal(Reason::NoCredentials);")]),
    ("gloo: the end of a sum that fills no register", Row("gloo-tcp-threads"), &[("crates/backend-gloo/src/kernels/loops.rs", "put(into_rest, fold_one::<F, U, N>(a, b));", "put::<N>(into_rest, [a, b][0]);")]),
    ("by device: a split forgets the order that was asked for", Row("gloo-by-device"), &[("crates/world/src/by_device.rs", "let child = member.group.split(color, key, deadline)?;", "let child = member.group.split(color, key & 0, deadline)?;")]),
    ("plugin: whom a message was from is lost", Row("gloo-plugin"), &[("crates/plugin/src/guest/group.rs", "source: completion.source.unwrap_or(abi::NONE),", "source: abi::NONE,")]),
    ("isolated: whom a message was from is lost", Row("gloo-isolated"), &[("crates/isolate/src/driver.rs", "Ok((source, contributors)) => operation.succeed(source, contributors),", "Ok((_, contributors)) => operation.succeed(None, contributors),")]),
    ("peers: a death is not heard", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/mod.rs", "if !left && self.is_first() {", "if left && self.is_first() {")]),
    ("peers: ranks that are set up in other ways meet", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/meet.rs", "if hello.world == own.world && hello.epoch == own.epoch && hello.setup == own.setup {", "if hello.world == own.world && hello.epoch == own.epoch {")]),
    ("peers: a barrier that cannot open is waited for", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/mod.rs", "let vain = state.over || state.closed;", "let vain = state.closed;")]),
    ("peers: a rank that comes after a refusal hears of a closed port only", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/meet.rs", "terms.refuse(c, error);", "")]),
    ("peers: a reason loses what it begins with as often as it stands there", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/mod.rs", "ErrorKind::Aborted => Error::new(ErrorKind::Aborted, self.place.reason(error)),", "ErrorKind::Aborted => Error::new(ErrorKind::Aborted, error.message().trim_start_matches(&format!(\"aborted by rank {}: \", self.place.rank))),")]),
    ("ranks must agree on a factor that each may have for itself", Tests("ftcore --lib -- fingerprints_differ"), &[("crates/ftcore/src/collective.rs", "fp.reduce = op.code();\n}\nSelf::Broadcast { tensors, root } => {", "fp.reduce = op.code();\nif let ReduceOp::PremulSum(factor) = op {\nfp.mix(factor.to_bits());\n}\n}\nSelf::Broadcast { tensors, root } => {")]),
    ("engine: a thread computes in its maker's mode for floats", Tests("ftcore --lib -- computes_as_all_do"), &[("crates/ftcore/src/engine/sync.rs", "let _mode = DefaultMode::set();", "drop(DefaultMode::set());")]),
    ("plugin: a call computes in its caller's mode for floats", Row("gloo-plugin"), &[("crates/plugin/src/host/library.rs", "let mode = DefaultMode::set();", "let mode = vec![drop(DefaultMode::set())];")]),
    ("xccl, uneven exchanges: every part is the first", Row("xccl"), &[("crates/backend-xccl/src/movement.rs", "return self.copy_each(&places(&received.each, back, None)?, &received.each);", "return self.copy_each(&places(&received.each, back, Some(0))?, &received.each);")]),
    ("xccl, lists: parts are packed in the wrong place", Row("xccl"), &[("crates/backend-xccl/src/movement.rs", "self.copy_each(parts, &places(parts, packed, None)?)?;", "self.copy_each(parts, &places(parts, packed, Some(0))?)?;")]),
    ("peers: a failure is blamed on the rank that tells of it", Tests("ftcore --lib -- peers"), &[("crates/ftcore/src/peers/wire.rs", "Error::new(kind, text).with_peer(blamed.unwrap_or(self.origin))", "Error::new(kind, text).with_peer(self.origin)")]),
    ("isolated: a rank counts as gone in good order while a part of it lives", Row("world-xccl-split"), &[("crates/isolate/src/notices.rs", "state.groups == 0", "true")]),
    ("gloo: a frame on its line is taken for another call's", Row("gloo-shm-threads"), &[("crates/backend-gloo/src/transport/shm/ring.rs", "if !same || end.load(Ordering::Relaxed) != until {", "if end.load(Ordering::Relaxed) != until {")]),
    ("gloo: a large piece of a message is not copied", Tests("backend-gloo --test gloo -- messages::blocking"), &[("crates/backend-gloo/src/p2p/local.rs", "transfer::copy(large, head, first);", "transfer::copy(large, if large { &mut [] } else { head }, first);")]),
    ("gloo: memory that its owner took back while it was read", Tests("backend-gloo --lib -- memory_that"), &[("crates/backend-gloo/src/transfer.rs", "if ring.tensors.gave_up() {", "if false && ring.tensors.gave_up() {")]),
    ("gloo: memory that is given up is not told", Tests("backend-gloo --lib -- memory_that"), &[("crates/backend-gloo/src/transport/shm/arena.rs", "page.word32::<GAVE_UP>().store(1, Ordering::SeqCst);", "page.word32::<GAVE_UP>().store(0, Ordering::SeqCst);")]),
    ("gloo: a lent part is over before it was read", Row("gloo-in-place"), &[("crates/backend-gloo/src/transfer.rs", "if !ring.writer.is_back(lent.until)? {", "if false && !ring.writer.is_back(lent.until)? {")]),
    ("gloo: memory beyond a neighbour's is read", Tests("backend-gloo --lib -- memory_that"), &[("crates/backend-gloo/src/transport/shm/arena.rs", ".filter(|at| at.saturating_add(len) <= theirs.len);", ".filter(|at| at.saturating_add(len) <= theirs.len || true);")]),
    ("gloo: an abort is not told as one", Row("gloo-mixed"), &[("crates/backend-gloo/src/queue.rs", "self.stop(Stop::Abort(error));", "self.stop(Stop::Leave(error.to_string()));")]),
    ("quantised: the mean is over all ranks", Tests("oxccl-quant --test quant-conformance"), &[("crates/quant/src/exchange.rs", "kernels.divide(out, range, contributors as f32)", "kernels.divide(out, range, self.place.world as f32)")]),
    ("quantised: a rank that stands aside counts", Tests("oxccl-quant --test quant-conformance"), &[("crates/quant/src/exchange.rs", "let contributes = opened.contributors == 1;", "let contributes = true;")]),
    ("quantised: a peer may claim any number of contributors", Tests("oxccl-quant --lib"), &[("crates/quant/src/chunk.rs", "if contributors > most {", "if false && contributors > most {")]),
    ("gloo: the deadline of an operation that no thread drives", Row("gloo-shm-threads"), &[("crates/backend-gloo/src/queue.rs", "let sleeps_past = due.is_some_and(|due| self.sleeps_until.is_none_or(|until| until > due));", "let sleeps_past = false;")]),
    ("gloo: what wakes the thread is rung where it does not sleep", Row("gloo-shm-threads"), &[("crates/backend-gloo/src/caller.rs", "self.bell().arm(Sleep::Thread);", "self.bell().arm(Sleep::Word);")]),
    ("gloo: an operation that was rung for while it was parked", Row("gloo-shm-threads"), &[("crates/backend-gloo/src/queue.rs", "let rung = !self.bell().is_armed();", "let rung = false;")]),
    ("gloo, uneven shares: a rank's own values count twice", Tests("backend-gloo --lib -- shares"), &[("crates/backend-gloo/src/schedule/uneven.rs", "let mut steps: Vec<Local> = (1..world)", "let mut steps: Vec<Local> = (0..world)")]),
    ("gloo, uneven shares: sums are handed out before they are made", Tests("backend-gloo --lib -- shares"), &[("crates/backend-gloo/src/schedule/uneven.rs", "s.rounds.extend(handed_out.replace(gather));", "s.rounds.push(gather);")]),
    ("gloo, uneven shares: they make more than a whole", Tests("backend-gloo --lib -- rates"), &[("crates/backend-gloo/src/schedule/rates.rs", "let share = end.saturating_sub(before);", "let share = end;")]),
    ("gloo, measured links: what this rank has seen has another's place", Tests("backend-gloo --test gloo -- links"), &[("crates/backend-gloo/src/rendezvous/measure.rs", "seen.insert(seen.len().min(rank as usize), self.seen.clone());", "seen.push(self.seen.clone());")]),
    ("gloo, measured links: only what this rank has seen", Tests("backend-gloo --test gloo -- links"), &[("crates/backend-gloo/src/rendezvous/measure.rs", "true => self.talks.iter().filter_map(|t| t.report.clone()).collect(),", "true => self.talks.iter().map(|_| self.seen.clone()).collect(),")]),
    ("gloo, measured links: reports are not awaited", Tests("backend-gloo --test gloo -- links"), &[("crates/backend-gloo/src/rendezvous/measure.rs", "let all = said && self.talks.iter().all(|t| t.report.is_some() && t.has_written());", "let all = said;")]),
    ("gloo: a driver that does not sleep never asks the clock", Tests("backend-gloo --lib -- asks_the_clock"), &[("crates/backend-gloo/src/waiter.rs", "self.slow || self.waits % CLOCK_EVERY == CLOCK_EVERY - 1", "self.slow")]),
    ("a work's end is not told to the one thread that sleeps for it", Tests("ftcore --lib -- work"), &[("crates/ftcore/src/work.rs", "if sleepers > 0 {", "if sleepers > 1 {")]),
    ("quantised: a header of another call is read", Tests("oxccl-quant --lib"), &[("crates/quant/src/chunk.rs", "if theirs != self.fingerprint {", "if false && theirs != self.fingerprint {")]),
    ("layout: the stage before and the stage after", Tests("oxccl-world --test all"), &[("crates/world/src/layout.rs", "Some((at(stage + length - 1), at(stage + 1)))", "Some((at(stage + 1), at(stage + length - 1)))")]),
    ("launchers: one node only is several", Tests("oxccl-world --lib"), &[("crates/world/src/launcher.rs", "let on_one_host = local_size == Some(world_size);", "let on_one_host = local_size == Some(world_size + 1);")]),
    ("credentials: a key that others can read", Tests("oxccl-identity"), &[("crates/identity/src/folder.rs", "if mode & 0o077 != 0 {", "if mode & 0o007 != 0 {")]),
    ("states: a tensor of another shape is taken", Tests("oxccl-replica"), &[("crates/replica/src/state_dict.rs", "if tensor.shape != shape {", "if false && tensor.shape != shape {")]),
    ("staged: a rank that stands aside contributes", Tests("backend-nccl --test gloo-staged-conformance -- contribut"), &[("crates/ftcore/src/staged.rs", "contribute: options.contribute,", "contribute: true,")]),
    ("counted: a mean is divided twice", Tests("oxccl-manager --lib"), &[("crates/manager/src/counted.rs", "let inner_op = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };", "let inner_op = op;")]),
    ("counted: a rank that stands aside counts", Tests("oxccl-manager --lib"), &[("crates/manager/src/counted.rs", "let one = u8::from(contribute);", "let one = u8::from(contribute || true);")]),
    ("DiLoCo: the fragments' turns are shifted", Tests("oxccl-diloco --test all"), &[("crates/diloco/src/streaming.rs", "usize::try_from(step.0 - 1).unwrap_or(0) % self.plan.len().max(1)", "usize::try_from(step.0).unwrap_or(0) % self.plan.len().max(1)")]),
    ("checkpoint: a header that promises more than there is", Tests("oxccl-checkpoint --lib"), &[("crates/checkpoint/src/codec.rs", "if header.data_len() != data_bytes {", "if false && header.data_len() != data_bytes {")]),
    ("lighthouse's answers: a place outside of the group", Tests("oxccl-coordination --lib -- wire"), &[("crates/coordination/src/wire.rs", "if result.replica_rank >= result.replica_world_size {", "if result.replica_rank > result.replica_world_size {")]),
    ("planning: the last bucket costs nothing", Tests("oxccl-fleet"), &[("crates/fleet/src/method.rs", "let (count, rest) = (values / bucket, values % bucket);", "let (count, rest) = (values / bucket, 0 * values);")]),
    ("DiLoCo: a lost vote is taken for a commit", Tests("oxccl-diloco --test all"), &[("crates/diloco/src/streaming.rs", "let Some(participation) = self.participation.take().filter(|_| committed) else {", "let Some(participation) = self.participation.take() else {")]),
    ("DiLoCo: an outer step beside training has an earlier round's momentum", Tests("oxccl-diloco --lib -- beside_its_caller"), &[("crates/diloco/src/optim.rs", "assign_slots(&mut self.velocity, &other.velocity);", "")]),
    ("DDP: what an earlier step left in a bucket is sent", Tests("oxccl-ddp --test all"), &[("crates/ddp/src/buckets.rs", "self.place_zeros();", "")]),
    ("DDP: micro-batches are not added up", Tests("oxccl-ddp --test all"), &[("crates/ddp/src/buckets.rs", "if self.micro_batch + 1 == self.micro_batches {", "if self.micro_batch == 0 {")]),
    ("simulator: the lighthouse's time between two measured sizes", Tests("oxccl-fleet"), &[("crates/fleet/src/simulate.rs", "time = before + (after - before) * (at - low) / (high - low);", "time = before;")]),
    ("launcher: the pause between restarts does not end", Tests("oxccl-launch --lib"), &[("apps/launch/src/supervisor.rs", ".min(self.backoff_max)", ".max(self.backoff_max)")]),
    ("isolated: an answer to a call that was not made", Tests("oxccl-isolate --lib"), &[("crates/isolate/src/link.rs", "if done.id >= self.next_id.load(Ordering::Relaxed) {", "if false && done.id >= self.next_id.load(Ordering::Relaxed) {")]),
    ("gloo: any number of open messages", Tests("backend-gloo --lib"), &[("crates/backend-gloo/src/p2p.rs", "if *open >= MAX_OFFERS {", "if false && *open >= MAX_OFFERS {")]),
    ("gloo: a message of another size is received", Tests("backend-gloo --test gloo-conformance -- message_and"), &[("crates/backend-gloo/src/p2p.rs", "if tensor.dtype().code() != offer.dtype || tensor.count() as u64 != offer.count {", "if tensor.dtype().code() != offer.dtype {")]),
    ("arguments: a tag where there are none", Tests("backend-nccl --test nccl-conformance -- arguments"), &[("crates/ftcore/src/validate.rs", "if tag == 0 || caps.has(Feature::Tags) {", "if true || tag == 0 || caps.has(Feature::Tags) {")]),
    ("gloo: a rank that has left is given up before all that it sent was looked at", Tests("backend-gloo --test gloo -- the_last_operation"), &[("crates/backend-gloo/src/direct.rs", "if shown_only && !port_of(self.executor, rank)?.read_closed() {", "if shown_only {")]),
    ("a library's report is the cause before what a peer has said", Tests("ftcore --lib -- what_another_rank"), &[("crates/ftcore/src/engine/in_flight.rs", "let waited = self.changed.wait_timeout_while(self.lock(), GRACE, watching);", "let waited = self.changed.wait_timeout_while(self.lock(), Duration::ZERO, watching);")]),
    ("lifecycle: an epoch again", Tests("ftcore --lib -- lifecycle"), &[("crates/ftcore/src/lifecycle.rs", "if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch <= last) {", "if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch < last) {")]),
    ("plugin: a time-out that overflows a clock", Tests("oxccl-plugin --lib"), &[("crates/plugin/src/fault.rs", "timeout.as_secs().min(LONGEST) * 1000 + u64::from(timeout.subsec_nanos().div_ceil(1_000_000));", "timeout.as_secs().min(LONGEST * 100) * 1000 + u64::from(timeout.subsec_nanos().div_ceil(1_000_000));")]),
    ("plugin: a handle of an earlier operation is taken", Tests("oxccl-plugin --lib"), &[("crates/plugin/src/host/handles.rs", "}) if *generation == handle.generation() => loan.plugin,", "}) if *generation >= handle.generation() => loan.plugin,")]),
    ("nccl: the least of integers is the greatest", Row("nccl-standin"), &[("crates/backend-nccl/src/enqueue.rs", "ReduceOp::Min => Some((Extreme::Min, redop::MIN)),", "ReduceOp::Min => Some((Extreme::Min, redop::MAX)),")]),
    ("lighthouse: the end of an epoch that was never delivered is told", Tests("oxccl-coordination --lib -- simulation::tests::seeds"), &[("crates/coordination/src/lighthouse/actor.rs", "Action::Push { event, .. } if self.put_off == Some(event.quorum_id) => {}", "")]),
    ("lighthouse: who committed in an epoch that the others had left is refused", Tests("oxccl-protocol --lib -- generations"), &[("crates/protocol/src/quorum/arrivals.rs", "Some(_) if job.left_behind(member) => {", "Some(_) if false && job.left_behind(member) => {")]),
    ("flight record: the environment is read when a group connects", Tests("ftcore --lib -- flight_recorder"), &[("crates/ftcore/src/flight_recorder.rs", "let length = environment::said().length;", "let length = environment::Said::now().length;")]),
    ("engine: a group has ended before every caller is told", Tests("ftcore --lib -- engine"), &[("crates/ftcore/src/engine/machine.rs", "self.ended |= (through || self.given_up) && self.all_told();", "self.ended |= through || self.given_up;")]),
    ("store's ranks compare: an operation that only one rank calls", Tests("ftcore"), &[("crates/ftcore/src/agreement.rs", "if sent != expected {", "if false && sent != expected {")]),
];

pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let asked = asked(&arguments.only)?;
    let metadata = Metadata::read()?;
    let copy = metadata.target_directory.join("xtask/faults/sources");
    copy_sources(&metadata.workspace_root, &copy)?;
    let mut found_all = true;
    // All of them before the first build.
    let planted = FAULTS
        .iter()
        .map(|fault| Ok((fault, plant(&copy, fault)?)))
        .collect::<Result<Vec<_>>>()?;
    println!("| without the cure | found by | seed | as |\n|---|---|---:|---|");
    for ((name, by, _), files) in planted.into_iter().filter(|((name, ..), _)| asked.contains(name)) {
        files.iter().try_for_each(|f| fs::write(&f.path, &f.without))?;
        let found = simulate(arguments, &copy, *by);
        files.iter().try_for_each(|f| fs::write(&f.path, &f.whole))?;
        let row = match found {
            Ok(Some((seed, told))) => {
                let seed = seed.map(|n| n.to_string()).unwrap_or_default();
                format!("{} | {seed} | {told}", by.told())
            }
            Ok(None) => "**nothing** | | ".to_string(),
            Err(error) => format!("**an error** | | {error:#}"),
        };
        found_all &= !row.starts_with("**");
        println!("| {name} | {row} |");
    }
    Ok(found_all)
}

/// The names of the faults in which one of these texts is, of all without any. Errors: there is none; a slip of the pen would look as if all were found.
fn asked(only: &[String]) -> Result<Vec<&'static str>> {
    let names = FAULTS.iter().map(|(name, ..)| *name);
    let asked: Vec<_> = names
        .filter(|name| only.is_empty() || only.iter().any(|text| name.contains(text)))
        .collect();
    if asked.is_empty() {
        bail!("no fault has {} in its name", only.join(" or "));
    }
    Ok(asked)
}

/// The files that git knows, as they are now.
fn copy_sources(root: &Path, copy: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.current_dir(root);
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    for name in String::from_utf8(git.output()?.stdout)?.split_terminator('\0') {
        let (from, to) = (root.join(name), copy.join(name));
        let Ok(text) = fs::read(&from) else { continue };
        // What is the same keeps its time, and is not built again.
        if fs::read(&to).is_ok_and(|old| old == text) {
            continue;
        }
        to.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// A file, and the same without the cure.
struct Planted {
    path: PathBuf,
    whole: String,
    without: String,
}

/// Errors: lines that are not there exactly once.
fn plant(copy: &Path, (name, by, places): &Fault) -> Result<Vec<Planted>> {
    let mut files: Vec<Planted> = Vec::new();
    let folder = copy.join(match by {
        Network => NETWORK,
        Row(_) | Tests(_) => "",
        Joint | Deaths => PROTOCOL,
    });
    for (file, lines, instead) in *places {
        let path = folder.join(file);
        let before = files.iter().position(|f| f.path == path);
        let mut planted = if let Some(at) = before {
            files.remove(at)
        } else {
            let whole = fs::read_to_string(&path).with_context(|| format!("'{name}': {}", path.display()))?;
            let without = whole.clone();
            Planted { path, whole, without }
        };
        let all: Vec<&str> = planted.without.lines().collect();
        let cure: Vec<&str> = lines.lines().collect();
        let is_there = |at: &usize| {
            let there = all[*at..].iter().map(|line| line.trim());
            there.take(cure.len()).eq(cure.iter().copied())
        };
        let found: Vec<usize> = (0..all.len()).filter(is_there).collect();
        let [first] = found[..] else {
            let times = found.len();
            bail!(
                "'{name}': in {file} these lines are {times} times, and should be once; bring xtask/src/faults.rs up to date:\n{lines}"
            );
        };
        let rest = &all[first + cure.len()..];
        planted.without = [&all[..first], &[instead], rest].concat().join("\n") + "\n";
        files.push(planted);
    }
    Ok(files)
}

/// A failed test of a row of the matrix, which is built and run as `cargo xtask test` does it.
fn run_row(copy: &Path, name: &str) -> Result<Option<(Option<u64>, String)>> {
    let mut cargo = cargo_command(copy);
    cargo.args(["xtask", "test", "--row", name]);
    cargo.env("CARGO_TARGET_DIR", copy.with_file_name("target"));
    let (log, limit) = (copy.with_extension("log"), Duration::from_secs(3600));
    let finished = process::run(&mut cargo, limit, Output::Log(&log), |_| {})?;
    let text = fs::read_to_string(&log)?;
    if finished.is_success() && text.contains("matrix: 1 passed") {
        return Ok(None);
    }
    // Also that it runs past its limit.
    let why = text
        .lines()
        .find_map(|line| line.strip_prefix("FAIL  ")?.trim_start().strip_prefix(name));
    match why.filter(|why| !why.contains("does not build")) {
        Some(why) => {
            let names = why.split_once(" tests failed: ").map_or(why, |(_, names)| names);
            Ok(Some((None, names.trim_start().chars().take(100).collect())))
        }
        // It does not build, or cannot run here.
        None => bail!("{}: see {}", finished.describe(), log.display()),
    }
}

/// The lowest seed that fails, or none of a test that has no seeds, and with what.
fn simulate(arguments: &Arguments, copy: &Path, by: By) -> Result<Option<(Option<u64>, String)>> {
    let seeds = if by == Network {
        &arguments.network_seeds
    } else {
        &arguments.seeds
    };
    let test = match by {
        Joint => "oxccl-protocol --test simulation-conformance -- whatever",
        Deaths => "oxccl-protocol --test simulation-conformance -- a_death",
        Network => "oxccl-coordination --lib -- simulation::tests::real",
        Tests(words) => words,
        Row(name) => return run_row(copy, name),
    };
    let mut cargo = cargo_command(copy);
    cargo.args(["test", "--quiet", "--package"]).args(test.split(' '));
    if !matches!(by, Tests(_)) {
        // Where a seed failed, and how.
        cargo.arg("--nocapture");
    }
    cargo
        .env("OXCCL_SIMULATION", seeds)
        .env("CARGO_TARGET_DIR", copy.with_file_name("target"));
    let (log, limit) = (copy.with_extension("log"), Duration::from_secs(1800));
    let finished = process::run(&mut cargo, limit, Output::Log(&log), |_| {})?;
    let text = fs::read_to_string(&log)?;
    let short = |told: &str| told.chars().take(100).collect::<String>().replace('|', "/");
    if let (Tests(_), Some((_, names))) = (by, text.rsplit_once("\nfailures:\n")) {
        let mut names = names.lines().filter_map(|line| line.strip_prefix("    "));
        return Ok(names.next().map(|name| (None, short(name))));
    }
    let failed = text.lines().filter_map(|line| {
        let (seed, told) = line.strip_prefix("seed ")?.split_once(": ")?;
        Some((Some(seed.parse().ok()?), short(told)))
    });
    let ran = text.contains("running ") && !text.contains("running 0 tests");
    match failed.min() {
        None if finished.is_success() && ran => Ok(None),
        // It does not build, or fails without a seed.
        None => bail!("{}: see {}", finished.describe(), log.display()),
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_no_fault_has_is_an_error() {
        assert_eq!(asked(&[]).unwrap().len(), FAULTS.len());
        let some = asked(&["planning".to_owned(), "no such fault".to_owned()]).unwrap();
        assert!(!some.is_empty() && some.len() < FAULTS.len());
        let e = asked(&["no such fault".to_owned()]).unwrap_err();
        assert!(e.to_string().contains("no such fault"), "{e}");
    }

    #[test]
    fn each_cure_stands_in_the_tree_once() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let wrong = |fault: &Fault| match plant(&root, fault) {
            Ok(planted) if planted.iter().all(|f| f.whole != f.without) => None,
            Ok(_) => Some(format!("'{}' changes nothing", fault.0)),
            Err(e) => Some(format!("{e:#}")),
        };
        let wrong: Vec<String> = FAULTS.iter().filter_map(wrong).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
