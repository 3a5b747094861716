//! Connections at rank 0's port that have not said who they are: each proves the job's secret, if there are credentials, then greets. None of
//! them is waited for, so none holds up the others.

use std::io::{ErrorKind as Io, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::identity::TurnedAway;
use crate::identity::hello::{self, Handshake, NO_RANK, Reason, Refused, Topic};
use crate::{Credentials, Error, Result, deadline_in, time_left};

use super::line::Line;
use super::wire::Hello;

/// A connection that has not greeted by then is dropped.
const GREETING: Duration = Duration::from_secs(2);
/// Connections that have not greeted, beside the ranks of the job; beyond it the oldest is dropped: a rank greets at once.
const MOST: usize = 256;
/// So many are taken before those that are there get a turn.
const AT_ONCE: usize = 64;

static TURNED_AWAY: TurnedAway = TurnedAway::new();

/// What the hello of a control connection is for.
pub(super) fn topic(backend: &str, epoch: u64, from: u32) -> Topic {
    Topic::new(backend, epoch, from, 0)
}

/// A connection that has greeted.
pub(super) struct Greeted {
    pub(super) stream: Line,
    pub(super) from: SocketAddr,
    pub(super) hello: Hello,
}

struct Stranger {
    stream: Line,
    from: SocketAddr,
    /// With credentials, until both ends have proved the job's secret.
    proof: Option<Box<Handshake>>,
    /// The rank as which it then proved itself.
    proved: Option<u32>,
    buffer: [u8; Hello::BYTES],
    have: usize,
    until: Instant,
}

/// Where a stranger stands.
enum Step {
    Waits,
    Greeted(Hello),
    Dropped(String),
    /// One of the two ends has no credentials, or those of another job.
    Refused(Refused),
}

/// The strangers at a port.
pub(super) struct Strangers {
    backend: &'static str,
    credentials: Option<Arc<Credentials>>,
    epoch: u64,
    most: usize,
    waiting: Vec<Stranger>,
    /// The last one that was turned away for its credentials: who, and why.
    pub(super) turned_away: Option<String>,
}

impl Strangers {
    pub(super) fn new(
        backend: &'static str,
        credentials: Option<Arc<Credentials>>,
        epoch: u64,
        world: u32,
    ) -> Self {
        Self {
            backend,
            credentials,
            epoch,
            most: MOST + world as usize,
            waiting: Vec::new(),
            turned_away: None,
        }
    }

    /// Takes what has come in at `listener`.
    ///
    /// Errors: what the system says about the listener.
    pub(super) fn accept(&mut self, listener: &TcpListener) -> std::io::Result<()> {
        for _ in 0..AT_ONCE {
            match listener.accept() {
                Ok((stream, from)) => {
                    if self.waiting.len() >= self.most {
                        self.drop_oldest();
                    }
                    if let Err(error) = self.add(stream, from) {
                        TURNED_AWAY.say(self.backend, &from, &error);
                    }
                }
                // A party that is gone again.
                Err(e) if matches!(e.kind(), Io::ConnectionAborted | Io::Interrupted) => {}
                Err(e) if e.kind() == Io::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn add(&mut self, stream: TcpStream, from: SocketAddr) -> Result<()> {
        let io = |e| Error::io("a control connection", e);
        stream.set_nonblocking(true).map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        let credentials = self.credentials.clone();
        let proof =
            credentials.map(|c| Handshake::listen(c, topic(self.backend, self.epoch, NO_RANK)).map(Box::new));
        self.waiting.push(Stranger {
            stream: stream.into(),
            from,
            proof: proof.transpose()?,
            proved: None,
            buffer: [0; Hello::BYTES],
            have: 0,
            until: deadline_in(GREETING),
        });
        Ok(())
    }

    fn drop_oldest(&mut self) {
        let oldest = self.waiting.iter().enumerate().min_by_key(|(_, s)| s.until);
        if let Some(index) = oldest.map(|(index, _)| index) {
            let stranger = self.waiting.swap_remove(index);
            let why = "there are too many that have not greeted, and it is the oldest";
            TURNED_AWAY.say(self.backend, &stranger.from, &why);
        }
    }

    /// Hears what strangers say, until one has greeted; `None` if none has.
    pub(super) fn next_greeted(&mut self) -> Option<Greeted> {
        let mut index = 0;
        while let Some(stranger) = self.waiting.get_mut(index) {
            let step = stranger.step();
            if matches!(step, Step::Waits) {
                index += 1;
                continue;
            }
            let mut stranger = self.waiting.swap_remove(index);
            match step {
                Step::Greeted(hello) => {
                    return Some(Greeted {
                        stream: stranger.stream,
                        from: stranger.from,
                        hello,
                    });
                }
                Step::Refused(refused) => {
                    drain(&mut stranger.stream);
                    TURNED_AWAY.say(self.backend, &stranger.from, &refused);
                    self.turned_away = Some(format!("from {}: {refused}", stranger.from));
                }
                Step::Dropped(why) => TURNED_AWAY.say(self.backend, &stranger.from, &why),
                Step::Waits => {}
            }
        }
        None
    }
}

impl Stranger {
    fn step(&mut self) -> Step {
        if let Some(mut proof) = self.proof.take() {
            match proof.advance(&mut self.stream) {
                Ok(true) => {
                    self.proved = Some(proof.topic().from());
                    match proof.into_records() {
                        Ok(records) => records.into_iter().for_each(|r| self.stream.encrypt(r)),
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
            let seen = self.buffer.get(..self.have).unwrap_or_default();
            if self.proved.is_none() && hello::may_be_hello(seen) {
                let _ = self.stream.write(&hello::refusal(Reason::NoCredentials));
                return Step::Refused(Refused::no_credentials());
            }
            let Some(room) = self.buffer.get_mut(self.have..).filter(|room| !room.is_empty()) else {
                break;
            };
            match self.stream.read(room) {
                Ok(0) => return Step::Dropped("it closed before it greeted".into()),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == Io::Interrupted => {}
                Err(e) if e.kind() == Io::WouldBlock => return self.waits(),
                Err(e) => return Step::Dropped(format!("the connection broke ({e})")),
            }
        }
        match Hello::decode(&self.buffer) {
            Ok(hello) if self.proved.is_some_and(|rank| rank != hello.rank) => {
                Step::Dropped("it proved itself as another rank".into())
            }
            Ok(hello) => Step::Greeted(hello),
            Err(error) => Step::Dropped(error.message().to_owned()),
        }
    }

    fn waits(&self) -> Step {
        match time_left(self.until).is_zero() {
            true => Step::Dropped("it did not greet in time".into()),
            false => Step::Waits,
        }
    }
}

/// Takes what has come in, up to a limit: a connection that is closed with bytes unread resets, and what was written last may not arrive.
fn drain(stream: &mut Line) {
    let mut sink = [0; 1024];
    for _ in 0..4 {
        if !matches!(stream.read(&mut sink), Ok(n) if n > 0) {
            return;
        }
    }
}
