//! Messages that one member matches and another moves: tags, and receives from any rank, over libraries that have neither.
//!
//! The *matcher* carries an envelope for each message, with the caller's tag, and so finds the receive that it belongs to. The receiver then
//! submits its library's receive and answers with the number of the message; at that the sender submits its library's send. One thread
//! (`ox-messages`) takes all these steps: a rank's answers to another leave in the order of its library receives, and are taken in that
//! order, so both ends of a library's channel see one sequence. Each direction of a pair of ranks is a channel of its own in every library,
//! so none waits for the opposite one.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use ftcore::engine::{self, Channel, Driver, Ended, Job, Label, Place, Rules, Stage, Ticket, spawn};
use ftcore::{Collective, Error, OpKind, Result, Stream};

use crate::member::Member;

mod desk;
mod message;

use desk::{Desk, Step};

/// The messages of one configuration.
pub(crate) type Engine = engine::Engine<Matching>;

/// The tag of the answers.
pub(crate) const ANSWERS: u32 = u32::MAX;

/// The members end their work at once when they are told to; the grace is for what their libraries still hold.
const RULES: Rules = Rules {
    depth: usize::MAX,
    grace: Duration::from_secs(5),
    gives_up: false,
};

/// What is submitted.
pub(crate) struct Call {
    pub(crate) op: Collective,
    /// Which member moves it.
    pub(crate) member: usize,
    /// It comes after what this one has by then: a stream of the call's own.
    pub(crate) stream: Option<Arc<dyn Stream>>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }

    /// The matcher and the libraries keep the order.
    fn channel(&self, _: &Label) -> Channel {
        Channel::Unordered
    }
}

/// The way to the thread that takes the steps.
pub(crate) struct Matching {
    members: Arc<[Member]>,
    place: Place,
    steps: Sender<Step>,
}

/// Starts the messages of a configuration, for which the last of `members` is the matcher.
pub(crate) fn start(members: &Arc<[Member]>, place: Place) -> Result<Arc<Engine>> {
    let (steps, incoming) = channel();
    let driver = Matching {
        members: members.clone(),
        place,
        steps,
    };
    let mut desk = Desk::new(members.clone(), place);
    spawn("ox-messages", move || desk.work(&incoming))?;
    Engine::start("ox-messages-in", place, RULES, driver)
}

impl Driver for Matching {
    type Job = Call;
    /// The members keep deadlines, too, say what they waited for, and tell the other ranks.
    const OVERTIME: Duration = Duration::from_secs(2);

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        // The thread ends with this driver, which the ticket keeps.
        let _ = self.steps.send(Step::Begin(Box::new((call, ticket))));
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        // What a member found out itself it has told the others already.
        for member in self.members.iter().filter(|m| m.group.error().is_none()) {
            member.group.abort(self.place.reason(failure));
        }
        let _ = self.steps.send(Step::Stop(failure.clone()));
        ended.clean();
    }

    /// The members go on: they are configured again, shut down or dropped by their owner.
    fn release(&self) -> Result<()> {
        Ok(())
    }

    fn waits_for(&self, label: &Label, _: Stage) -> String {
        let whom = match (label.kind, label.message) {
            (OpKind::Send, Some((Some(peer), tag))) => {
                format!("rank {peer} to receive a message with tag {tag}")
            }
            (_, Some((Some(peer), tag))) => format!("a message from rank {peer} with tag {tag}"),
            (_, Some((None, tag))) => format!("a message from any rank with tag {tag}"),
            _ => "one of its messages".to_string(),
        };
        format!("waiting for {whom}")
    }
}
