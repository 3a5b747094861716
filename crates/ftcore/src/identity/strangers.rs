//! Connections that came in at a port and have not said who they are: each proves the job's secret, if there are credentials, then says so many
//! bytes. None of them is waited for, so none holds up the others; what becomes of those that do not belong here is decided and logged here.

use std::fmt;
use std::io::{ErrorKind as Io, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Credentials;
use super::TurnedAway;
use super::hello::{self, Handshake, Reason, Refused, Topic};
use super::records::{Opener, Sealer};
use crate::{Result, deadline_in, descriptors, time_left};

/// A connection that has not greeted by then is dropped.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that have not greeted, beside those of the job; beyond it the oldest is dropped: a rank greets at once.
const MOST: usize = 256;
/// So many are taken before those that are there get a turn.
const AT_ONCE: usize = 64;

static TURNED_AWAY: TurnedAway = TurnedAway::new();

/// A connection that came in. It does not block: what it cannot do now it answers with `WouldBlock`.
pub trait Caller: Read + Write {
    /// What follows the hello goes through these.
    fn encrypt(&mut self, records: (Sealer, Opener));
}

/// A connection that has greeted, with the `N` bytes that it said.
pub struct Greeted<C, const N: usize> {
    /// The connection.
    pub caller: C,
    /// Where it came from, for messages.
    pub from: String,
    /// The rank as which it has proved the job's secret; `None` without credentials.
    pub proved: Option<u32>,
    /// Its greeting.
    pub said: [u8; N],
}

struct Stranger<C, const N: usize> {
    caller: C,
    from: String,
    /// With credentials, until both ends have proved the job's secret.
    proof: Option<Box<Handshake>>,
    proved: Option<u32>,
    said: [u8; N],
    have: usize,
    until: Instant,
}

/// Where a stranger stands.
enum Step {
    Waits,
    Greeted,
    Dropped(String),
    /// One of the two ends has no credentials, or those of another job.
    Refused(Refused),
    /// This process has no descriptor left for what came along.
    NoRoom(std::io::Error),
}

/// The strangers at the ports of one backend's rank.
pub struct Strangers<C, const N: usize> {
    backend: &'static str,
    credentials: Option<Arc<Credentials>>,
    topic: Topic,
    most: usize,
    waiting: Vec<Stranger<C, N>>,
    /// The last one that was turned away for its credentials: who, and why.
    turned_away: Option<String>,
}

impl<C: Caller, const N: usize> Strangers<C, N> {
    /// None yet. `expected`: how many the other ranks may make at once. `topic`: what the hello of the credentials is about.
    pub fn new(
        backend: &'static str,
        credentials: Option<Arc<Credentials>>,
        topic: Topic,
        expected: usize,
    ) -> Self {
        Self {
            backend,
            credentials,
            topic,
            most: MOST.saturating_add(expected),
            waiting: Vec::new(),
            turned_away: None,
        }
    }

    /// Takes what has come in. `next` takes one connection from a listener that does not block, and says where it came from.
    ///
    /// Errors: what the system says about the listener.
    pub fn accept(
        &mut self,
        mut next: impl FnMut() -> std::io::Result<(Result<C>, String)>,
    ) -> std::io::Result<()> {
        for _ in 0..AT_ONCE {
            match next() {
                Ok((caller, from)) => {
                    if self.waiting.len() >= self.most {
                        self.drop_oldest();
                    }
                    if let Err(error) = caller.and_then(|caller| self.add(caller, from.clone())) {
                        self.drop(&from, &error);
                    }
                }
                // One that is gone again.
                Err(e) if matches!(e.kind(), Io::ConnectionAborted | Io::Interrupted) => {}
                Err(e) if e.kind() == Io::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn add(&mut self, caller: C, from: String) -> Result<()> {
        let credentials = self.credentials.clone();
        let proof = credentials.map(|c| Handshake::listen(c, self.topic).map(Box::new));
        self.waiting.push(Stranger {
            caller,
            from,
            proof: proof.transpose()?,
            proved: None,
            said: [0; N],
            have: 0,
            until: deadline_in(GREETING),
        });
        Ok(())
    }

    fn drop_oldest(&mut self) {
        let oldest = self.waiting.iter().enumerate().min_by_key(|(_, s)| s.until);
        if let Some(index) = oldest.map(|(index, _)| index) {
            let stranger = self.waiting.swap_remove(index);
            self.drop(
                &stranger.from,
                &"there are too many that have not said who they are, and it is the oldest",
            );
        }
    }

    /// Logs that the connection from `from` is turned away, and why.
    pub fn drop(&self, from: &str, why: &dyn fmt::Display) {
        TURNED_AWAY.say(self.backend, &from, why);
    }

    /// Hears what strangers say, until one has greeted; `None` if none has.
    ///
    /// Errors: this process has no descriptor left for what a connection hands over.
    pub fn greeted(&mut self) -> std::io::Result<Option<Greeted<C, N>>> {
        let mut index = 0;
        while let Some(stranger) = self.waiting.get_mut(index) {
            let step = stranger.step();
            if matches!(step, Step::Waits) {
                index += 1;
                continue;
            }
            let mut stranger = self.waiting.swap_remove(index);
            match step {
                Step::Greeted => {
                    return Ok(Some(Greeted {
                        caller: stranger.caller,
                        from: stranger.from,
                        proved: stranger.proved,
                        said: stranger.said,
                    }));
                }
                Step::Refused(refused) => {
                    drain(&mut stranger.caller);
                    self.drop(&stranger.from, &refused);
                    self.turned_away = Some(format!("from {}: {refused}", stranger.from));
                }
                Step::Dropped(why) => self.drop(&stranger.from, &why),
                Step::NoRoom(error) => return Err(error),
                Step::Waits => {}
            }
        }
        Ok(None)
    }

    /// Those that are still to be heard, and until when.
    pub fn waiting(&self) -> impl Iterator<Item = (&C, Instant)> {
        self.waiting.iter().map(|s| (&s.caller, s.until))
    }

    /// For the message of a rank that waits in vain: the last connection that was turned away for its credentials. Empty if there was none.
    pub fn hint(&self) -> String {
        match &self.turned_away {
            Some(text) => format!("; a connection was turned away, {text}"),
            None => String::new(),
        }
    }
}

impl<C: Caller, const N: usize> Stranger<C, N> {
    fn step(&mut self) -> Step {
        if let Some(mut proof) = self.proof.take() {
            match proof.advance(&mut self.caller) {
                Ok(true) => {
                    self.proved = Some(proof.topic().from());
                    match proof.into_records() {
                        Ok(records) => records.into_iter().for_each(|r| self.caller.encrypt(r)),
                        Err(e) => return Step::Dropped(e.to_string()),
                    }
                }
                Ok(false) => {
                    self.proof = Some(proof);
                    return self.waits();
                }
                Err(e) => {
                    return match Refused::of(&e) {
                        Some(refused) => Step::Refused(refused.clone()),
                        None => Step::Dropped(format!("the hello came to nothing: {e}")),
                    };
                }
            }
        }
        loop {
            let seen = self.said.get(..self.have).unwrap_or_default();
            if self.proved.is_none() && hello::may_be_hello(seen) {
                let _ = self.caller.write(&hello::refusal(Reason::NoCredentials));
                return Step::Refused(Refused::no_credentials());
            }
            let Some(room) = self.said.get_mut(self.have..).filter(|room| !room.is_empty()) else {
                return Step::Greeted;
            };
            match self.caller.read(room) {
                Ok(0) => return Step::Dropped("it closed before it said who it is".into()),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == Io::Interrupted => {}
                Err(e) if e.kind() == Io::WouldBlock => return self.waits(),
                Err(e) if descriptors::is_limit(&e) => return Step::NoRoom(e),
                Err(e) => return Step::Dropped(format!("it broke before it said who it is ({e})")),
            }
        }
    }

    fn waits(&self) -> Step {
        match time_left(self.until).is_zero() {
            true => Step::Dropped("it did not say who it is in time".into()),
            false => Step::Waits,
        }
    }
}

/// Takes what has come in, up to a limit: a connection that is closed with bytes unread resets, and what was written last may not arrive.
fn drain(caller: &mut impl Read) {
    let mut sink = [0; 1024];
    for _ in 0..4 {
        if !matches!(caller.read(&mut sink), Ok(n) if n > 0) {
            return;
        }
    }
}
