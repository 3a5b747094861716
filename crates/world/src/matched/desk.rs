//! The thread of matched messages: what each of them waits for, and what comes next.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ftcore::engine::{Place, Ticket};
use ftcore::{
    Capabilities, Checked, Collective, Completion, DType, Error, ErrorKind, Event, Result, Status, Stream,
    SubmitOptions, Tensor, Work,
};

use super::message::{Content, Part, WORDS, read, words};
use super::{ANSWERS, Call, Engine, Matching};
use crate::member::Member;

/// How much later than its message an answer is given up: what that waits for is said before.
const LATER: Duration = Duration::from_secs(5);

/// One message of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    op: u64,
    part: usize,
}

pub(super) enum Step {
    Begin(Box<(Call, Ticket<Matching>)>),
    /// The envelope for a receive is here.
    Envelope(Key, Work),
    /// An answer of that rank is here.
    Answer(Arc<Engine>, u32, Work),
    Recorded(Key, Arc<dyn Event>),
    /// The library is done with it.
    Moved(Key, Work),
    Failed(Key, Error),
    /// The group has failed.
    Stop(Error),
}

/// What this rank sends to another one.
#[derive(Default)]
struct Pair {
    next: u64,
    /// By their numbers.
    unanswered: HashMap<u64, Key>,
    /// The last deadline so far: any answer may be that of any message.
    latest: Option<Instant>,
}

/// An operation that has not ended.
struct Open {
    ticket: Ticket<Matching>,
    member: usize,
    stream: Option<Arc<dyn Stream>>,
    parts: Vec<Part>,
    left: usize,
    source: Option<u32>,
    failure: Option<Error>,
}

impl Open {
    fn new(call: Call, ticket: Ticket<Matching>) -> Self {
        let ops = match call.op {
            Collective::Batch { ops } => ops,
            one => vec![one],
        };
        let part = |op| Part::of(op, call.member);
        let parts: Vec<Part> = ops.into_iter().filter_map(part).collect();
        Self {
            ticket,
            member: call.member,
            stream: call.stream,
            left: parts.len(),
            parts,
            source: None,
            failure: None,
        }
    }

    /// Tells its caller.
    fn end(self) {
        let tensors = self.parts.into_iter().filter_map(|part| part.tensor).collect();
        match self.failure {
            Some(error) => self.ticket.fail(error, tensors),
            None => self.ticket.succeed(Completion {
                tensors,
                source: self.source,
                contributors: 0,
            }),
        }
    }
}

/// What the thread knows.
pub(super) struct Desk {
    members: Arc<[Member]>,
    place: Place,
    open: HashMap<u64, Open>,
    pairs: HashMap<u32, Pair>,
    /// Found here: what else fails fails because of it.
    disagreement: Option<Error>,
}

/// Submits to a member. A call that was accepted before the member failed ends with the cause, not with a refusal because of it.
fn submit(
    member: &Member,
    capabilities: &Capabilities,
    op: Collective,
    options: SubmitOptions,
) -> Result<Work, (Error, Vec<Tensor>)> {
    let checked = Checked::new(op, &member.group.info(), capabilities, &options);
    let submitted = checked.and_then(|checked| member.group.submit(checked, options));
    submitted.map_err(|rejected| {
        let error = match rejected.error.kind() {
            ErrorKind::Poisoned => member.group.error().unwrap_or(rejected.error),
            _ => rejected.error,
        };
        (error, rejected.op.into_tensors())
    })
}

/// The library knows no tag, and so cannot name it where it says what it waited for.
fn with_tag(error: Error, tag: u32) -> Error {
    if error.kind() != ErrorKind::Timeout {
        return error;
    }
    let text = format!(
        "the message with tag {tag} was matched, and then not moved: {}",
        error.message()
    );
    let named = Error::new(error.kind(), text).with_source(error.clone());
    match error.context().peer {
        Some(peer) => named.with_peer(peer),
        None => named,
    }
}

impl Desk {
    pub(super) fn new(members: Arc<[Member]>, place: Place) -> Self {
        Self {
            members,
            place,
            open: HashMap::new(),
            pairs: HashMap::new(),
            disagreement: None,
        }
    }

    /// Ends with the driver and its last operation.
    pub(super) fn work(&mut self, incoming: &Receiver<Step>) {
        for step in incoming {
            match step {
                Step::Begin(begun) => {
                    let (call, ticket) = *begun;
                    self.begin(call, ticket);
                }
                Step::Envelope(key, work) => match read(&work) {
                    Ok((source, number, content)) => self.matched(key, source, number, content),
                    Err(error) => self.fail(key, error),
                },
                Step::Answer(engine, peer, work) => self.answered(&engine, peer, &work),
                Step::Recorded(key, done) => {
                    if let Some(open) = self.open.get(&key.op).filter(|open| open.parts.len() == 1) {
                        open.ticket.recorded(done);
                    }
                }
                Step::Moved(key, work) => self.moved(key, &work),
                Step::Failed(key, error) => self.fail(key, error),
                Step::Stop(error) => self.stop(&error),
            }
        }
    }

    fn begin(&mut self, call: Call, ticket: Ticket<Matching>) {
        let (op, open) = (ticket.number(), Open::new(call, ticket));
        let count = open.left;
        self.open.insert(op, open);
        for part in 0..count {
            let key = Key { op, part };
            if let Err(error) = self.announce(key) {
                self.fail(key, error);
            }
        }
    }

    /// What the steps of an operation go to; its deadline; the message.
    fn at(&self, key: Key) -> Option<(&Open, &Part)> {
        let open = self.open.get(&key.op)?;
        Some((open, open.parts.get(key.part)?))
    }

    /// Hands a message to the matcher.
    fn announce(&mut self, key: Key) -> Result<()> {
        let Some((open, part)) = self.at(key) else {
            return Ok(());
        };
        let engine = open.ticket.engine().clone();
        let (deadline, tag, content) = (open.ticket.deadline(), part.tag, part.content);
        let steps = engine.driver().steps.clone();
        let blank = || Tensor::zeros(DType::U64, WORDS);
        let (true, Some(peer)) = (part.send, part.peer) else {
            let (tensor, peer) = (blank(), part.peer);
            let work = self.tell(Collective::Recv { tensor, peer, tag }, deadline)?;
            let done = work.clone();
            work.on_complete(move |_| drop(steps.send(Step::Envelope(key, done))));
            return Ok(());
        };
        let pair = self.pairs.entry(peer).or_default();
        let number = pair.next;
        pair.next += 1;
        pair.unanswered.insert(number, key);
        let latest = pair.latest.map_or(deadline, |latest| latest.max(deadline));
        pair.latest = Some(latest);
        let answer = Collective::Recv {
            tensor: blank(),
            peer: Some(peer),
            tag: ANSWERS,
        };
        let work = self.tell(answer, latest.checked_add(LATER).unwrap_or(latest))?;
        let (done, answered) = (work.clone(), steps.clone());
        work.on_complete(move |_| drop(answered.send(Step::Answer(engine, peer, done))));
        let tensor = words(number, content);
        let envelope = self.tell(Collective::Send { tensor, peer, tag }, deadline)?;
        envelope.on_complete(move |status| {
            if let Status::Failed(error) = status {
                drop(steps.send(Step::Failed(key, error.clone())));
            }
        });
        Ok(())
    }

    fn tell(&self, op: Collective, deadline: Instant) -> Result<Work> {
        let matcher = self.members.last();
        let matcher = matcher.ok_or_else(|| Error::new(ErrorKind::Internal, "a group without members"))?;
        let options = SubmitOptions::by(deadline);
        submit(matcher, matcher.group.capabilities(), op, options).map_err(|(error, _)| error)
    }

    /// A receive has its message: the library's receive first, then the answer.
    fn matched(&mut self, key: Key, source: u32, number: u64, theirs: Content) {
        let Some((open, part)) = self.at(key) else {
            return;
        };
        let (deadline, ours) = (open.ticket.deadline(), part.content);
        let steps = open.ticket.engine().driver().steps.clone();
        let wrong = self.compare((source, theirs), part.tag, (self.place.rank, ours));
        let wrong = wrong.map(|error| error.with_peer(source));
        if let Some(open) = self.open.get_mut(&key.op).filter(|open| open.parts.len() == 1) {
            open.source = Some(source);
        }
        match &wrong {
            None => self.move_it(key, source),
            Some(error) => self.disagreement = Some(error.clone()),
        }
        let answer = Collective::Send {
            tensor: words(number, ours),
            peer: source,
            tag: ANSWERS,
        };
        match self.tell(answer, deadline) {
            // The other end finds the same; it must have heard before the group ends here.
            Ok(work) => work.on_complete(move |status| {
                let failure = match status {
                    Status::Failed(error) => Some(error.clone()),
                    _ => None,
                };
                if let Some(error) = wrong.or(failure) {
                    drop(steps.send(Step::Failed(key, error)));
                }
            }),
            Err(error) => self.fail(key, error),
        }
    }

    /// A rank has submitted its library's receive of one of this rank's messages.
    fn answered(&mut self, engine: &Arc<Engine>, peer: u32, work: &Work) {
        let answer = read(work);
        let pair = self.pairs.entry(peer).or_default();
        let (number, theirs) = match answer {
            Ok((_, number, theirs)) => (number, theirs),
            Err(error) => {
                for (_, key) in std::mem::take(&mut pair.unanswered) {
                    self.fail(key, error.clone());
                }
                return;
            }
        };
        let Some(key) = pair.unanswered.remove(&number) else {
            let text = format!("rank {peer} answers message {number}, which does not wait for that");
            return engine.fail(Error::new(ErrorKind::Protocol, text).with_peer(peer));
        };
        let Some((_, part)) = self.at(key) else {
            return;
        };
        match self.compare((self.place.rank, part.content), part.tag, (peer, theirs)) {
            Some(error) => {
                let error = error.with_peer(peer);
                self.disagreement = Some(error.clone());
                self.fail(key, error);
            }
            None => self.move_it(key, peer),
        }
    }

    /// Both ends of a message must speak of the same. The words are gloo's.
    fn compare(&self, sends: (u32, Content), tag: u32, receives: (u32, Content)) -> Option<Error> {
        let ((from, sent), (to, received)) = (sends, receives);
        if sent == received {
            return None;
        }
        let of = |c: Content| {
            let dtype = DType::from_code(c.dtype).map_or("an unknown dtype", DType::name);
            let elements = format!("{} elements of {dtype}", c.count);
            let member = usize::try_from(c.member).ok().and_then(|n| self.members.get(n));
            match member.filter(|_| sent.member != received.member) {
                Some(member) => format!("{elements} on {}", member.name()),
                None => elements,
            }
        };
        let (sent, received) = (of(sent), of(received));
        let text = format!("rank {from} sends {sent} with tag {tag}; rank {to} receives {received}");
        Some(Error::new(ErrorKind::Mismatch, text))
    }

    /// Hands a message to the library.
    fn move_it(&mut self, key: Key, peer: u32) {
        let Some(open) = self.open.get_mut(&key.op) else {
            return;
        };
        let (index, steps) = (open.member, open.ticket.engine().driver().steps.clone());
        let options = SubmitOptions {
            stream: open.stream.clone(),
            ..SubmitOptions::by(open.ticket.deadline())
        };
        let Some(part) = open.parts.get_mut(key.part) else {
            return;
        };
        let (Some(member), Some(tensor)) = (self.members.get(index), part.tensor.take()) else {
            return;
        };
        let op = match part.send {
            true => Collective::Send { tensor, peer, tag: 0 },
            false => Collective::Recv {
                tensor,
                peer: Some(peer),
                tag: 0,
            },
        };
        match submit(member, member.group.capabilities(), op, options) {
            Ok(work) => {
                let (done, recorded) = (work.clone(), steps.clone());
                work.on_recorded(move |event| drop(recorded.send(Step::Recorded(key, event))));
                work.on_complete(move |_| drop(steps.send(Step::Moved(key, done))));
            }
            Err((error, mut tensors)) => {
                part.tensor = tensors.pop();
                self.fail(key, error);
            }
        }
    }

    fn moved(&mut self, key: Key, work: &Work) {
        let (tensor, failure) = match work.take() {
            Ok(done) => (done.into_tensor().ok(), None),
            Err(error) => (work.recover().pop(), Some(error)),
        };
        let open = self.open.get_mut(&key.op);
        let Some(part) = open.and_then(|open| open.parts.get_mut(key.part)) else {
            return;
        };
        part.tensor = tensor;
        let tag = part.tag;
        if let Some(error) = failure {
            self.fail_by(key, with_tag(error, tag));
        }
        self.settle(key);
    }

    /// Gives back what no library has, whatever it waits for.
    fn stop(&mut self, error: &Error) {
        let keys: Vec<Key> = self
            .open
            .iter()
            .flat_map(|(op, open)| (0..open.parts.len()).map(|part| Key { op: *op, part }))
            .collect();
        for key in keys {
            self.fail(key, error.clone());
        }
    }

    /// A message has failed. What the library has comes back by itself.
    fn fail(&mut self, key: Key, error: Error) {
        self.fail_by(key, error);
        if self.at(key).is_some_and(|(_, part)| part.tensor.is_some()) {
            self.settle(key);
        }
    }

    fn fail_by(&mut self, key: Key, error: Error) {
        let error = self.disagreement.clone().unwrap_or(error);
        if let Some(open) = self.open.get_mut(&key.op).filter(|open| open.failure.is_none()) {
            open.failure = Some(error.clone());
            open.ticket.engine().fail_by(key.op, error);
        }
    }

    /// Nothing touches the message's memory any more. The last one of an operation ends that.
    fn settle(&mut self, key: Key) {
        let Some(open) = self.open.get_mut(&key.op) else {
            return;
        };
        let part = open.parts.get_mut(key.part).filter(|part| !part.over);
        let Some(part) = part else {
            return;
        };
        part.over = true;
        open.left = open.left.saturating_sub(1);
        if open.left > 0 {
            return;
        }
        if let Some(open) = self.open.remove(&key.op) {
            open.end();
        }
    }
}
