//! The keyed hello: both ends of a connection prove that they hold the job's secret before they say anything else.
//!
//! The caller sends `Open`, the listener `Answer`, the caller `Proof`; each is of fixed size and begins with the same header. A proof is a keyed
//! BLAKE3 hash over everything said so far, with fresh nonces of both ends, the job's id and what the connection is for. The [`Handshake`] does no
//! IO: [`advance`](Handshake::advance) moves its bytes over a stream, blocking or not. The layout, with test vectors, is in
//! `docs/credentials-data-plane.md`.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use super::Credentials;
use super::records::{self, NotAuthentic, Opener, Sealer};
use crate::coded::coded;
use crate::fields::{Put, Take};
use crate::{Epoch, Error, Result};

/// In the place of a rank that has no number, as the clients of a store.
pub const NO_RANK: u32 = u32::MAX;

/// No protocol that is spoken beside it begins so: the first byte is neither text nor a request of a TCPStore.
const MAGIC: [u8; 8] = *b"\xABOXHELLO";
const VERSION: u8 = 1;
const HEADER: usize = 16;
const NONCE: usize = 32;
const MAC: usize = 32;
const OPEN: usize = HEADER + 32 + NONCE;
const ANSWER: usize = HEADER + NONCE + MAC;
const PROOF: usize = HEADER + MAC;
/// The longest message.
const LONGEST: usize = 80;
/// A job's id has at most 63 bytes.
const JOB: usize = 64;
/// Keeps the key of this hello apart from others that may be made of the secret.
const KEY: &str = "oxccl data plane hello v1";
const LISTENER: [u8; 16] = *b"oxccl listener 1";
const CALLER: [u8; 16] = *b"oxccl caller   1";
/// The records of the one and the other direction.
const RECORDS: [&[u8]; 2] = [
    b"oxccl records of the caller 1",
    b"oxccl records of the listener 1",
];

const _: () = assert!(OPEN == LONGEST && ANSWER == LONGEST && PROOF < LONGEST);

/// The kinds of messages.
const KIND_OPEN: u8 = 1;
const KIND_ANSWER: u8 = 2;
const KIND_PROOF: u8 = 3;
const KIND_REFUSAL: u8 = 4;

/// What a connection is for. Both ends must mean the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Topic {
    purpose: [u8; 15],
    /// What follows the hello is encrypted: set by the handshake.
    encrypted: bool,
    epoch: Epoch,
    from: u32,
    to: u32,
}

impl Topic {
    /// `purpose` names the service, in at most 15 bytes (more are cut). `from` is the caller's rank and `to` the listener's; [`NO_RANK`] where
    /// there is none. A listener need not know `from`: it learns it.
    pub fn new(purpose: &str, epoch: Epoch, from: u32, to: u32) -> Self {
        let mut name = [0; 15];
        name.iter_mut()
            .zip(purpose.bytes())
            .for_each(|(to, from)| *to = from);
        Self {
            purpose: name,
            encrypted: false,
            epoch,
            from,
            to,
        }
    }

    /// The caller's rank: of a listener, once the handshake is done.
    pub fn from(&self) -> u32 {
        self.from
    }

    fn encode(&self) -> [u8; 32] {
        let mut out = [0; 32];
        let mut put = Put(&mut out);
        put.bytes(&self.purpose);
        put.bytes(&[u8::from(self.encrypted)]);
        put.u64(self.epoch.0);
        put.u32(self.from);
        put.u32(self.to);
        out
    }

    fn decode(bytes: &[u8; 32]) -> Self {
        let mut take = Take(bytes);
        Self {
            purpose: take.bytes(),
            encrypted: take.bytes() != [0],
            epoch: Epoch(take.u64()),
            from: take.u32(),
            to: take.u32(),
        }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |b: &&u8| b.is_ascii_graphic();
        for byte in self.purpose.iter().take_while(named) {
            write!(f, "{}", char::from(*byte))?;
        }
        if self.epoch != Epoch(0) {
            write!(f, " of epoch {}", self.epoch)?;
        }
        match self.to {
            NO_RANK => Ok(()),
            to => write!(f, " of rank {to}"),
        }
    }
}

impl fmt::Debug for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Topic({self}, from {})", self.from)
    }
}

coded! {
    /// Why one end refuses the other.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Reason {
        /// What came is not a hello: who sent it has no credentials, or is of another service.
        NoHello = 1,
        /// A hello came, and the end that got it has no credentials.
        NoCredentials = 2,
        /// The proof is wrong: the two ends hold different secrets, or job ids.
        WrongProof = 3,
        /// The hello is for another service, epoch or rank.
        OtherTopic = 4,
        /// The hello is of another version.
        OtherVersion = 5,
        /// One end encrypts the connection and the other does not.
        Encryption = 6,
    }
}

/// One end refused the other. Its text begins with "it": the other end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Refused {
    reason: Reason,
    /// The other end said so.
    told: bool,
    job: Option<String>,
    topics: Option<(Topic, Topic)>,
}

impl Refused {
    /// Why.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The refusal in an error of [`Handshake::advance`].
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }

    /// A hello came, and this end has no credentials: what it logs when it has answered with [`refusal`].
    pub fn no_credentials() -> Self {
        Self {
            reason: Reason::NoCredentials,
            told: false,
            job: None,
            topics: None,
        }
    }

    /// What an end without credentials makes of the first bytes that came: a hello, or the refusal of an end with credentials. `None` for
    /// anything else, and while too little of it is there. It answers the former with [`refusal`].
    pub fn seen_without_credentials(bytes: &[u8]) -> Option<Self> {
        let header = Header::decode(bytes.first_chunk::<HEADER>()?)?;
        if header.kind != KIND_REFUSAL {
            return Some(Self::no_credentials());
        }
        Some(Self {
            reason: Reason::from_code(header.reason)?,
            told: true,
            ..Self::no_credentials()
        })
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variable = Credentials::VARIABLE;
        let job = match &self.job {
            Some(job) => format!("job {job}"),
            None => "this job".to_owned(),
        };
        match (self.reason, self.told) {
            (Reason::NoHello, false) => write!(
                f,
                "it did not say the hello of {job}: it has no credentials (set {variable} there, too), or is another service"
            ),
            (Reason::NoHello, true) => write!(
                f,
                "it asks for a job's credentials and this process has none; set {variable} to the job's folder"
            ),
            (Reason::NoCredentials, false) => write!(
                f,
                "it has credentials and this process has none; set {variable} on both sides or on neither"
            ),
            (Reason::NoCredentials, true) => write!(
                f,
                "it has no credentials, and this process has those of {job}; set {variable} there, too"
            ),
            (Reason::WrongProof, false) => write!(
                f,
                "it does not hold the secret of {job}: it has the credentials of another job, or of an older folder"
            ),
            (Reason::WrongProof, true) => write!(
                f,
                "it has other credentials than those of {job}: of another job, or of an older folder"
            ),
            (Reason::OtherTopic, _) => match &self.topics {
                Some((theirs, own)) => write!(f, "its hello is for {theirs}, and this is {own}"),
                None => write!(f, "it is another service, epoch or rank than the one called"),
            },
            (Reason::Encryption, _) => write!(
                f,
                "one of the two encrypts its connections and the other does not; set {}=1 (or the hint `encrypt`) on all processes of {job}, or \
                 on none",
                super::ENCRYPT
            ),
            (Reason::OtherVersion, _) => {
                write!(
                    f,
                    "it speaks another version of the hello than {VERSION}: different builds?"
                )
            }
        }
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, refused)
    }
}

/// The message with which an end without credentials answers a hello, so that the caller can say what is wrong.
pub fn refusal(reason: Reason) -> [u8; 16] {
    Header {
        version: VERSION,
        kind: KIND_REFUSAL,
        reason: reason.code(),
    }
    .encode()
}

/// True if `bytes` may be the beginning of a hello, or are one. At least one byte is needed.
pub fn may_be_hello(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().zip(&MAGIC).all(|(a, b)| a == b)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    version: u8,
    kind: u8,
    reason: u8,
}

impl Header {
    fn encode(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let mut put = Put(&mut out);
        put.bytes(&MAGIC);
        put.bytes(&[self.version, self.kind, self.reason]);
        out
    }

    /// `None` if it is not one.
    fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let mut take = Take(bytes);
        let magic: [u8; 8] = take.bytes();
        let [version, kind, reason] = take.bytes();
        let rest: [u8; 5] = take.bytes();
        (magic == MAGIC && rest == [0; 5]).then_some(Self {
            version,
            kind,
            reason,
        })
    }
}

/// Where a handshake stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The listener waits for `Open`, the caller for `Answer`, the listener for `Proof`.
    Open,
    Answer,
    Proof,
    /// Nothing more comes in.
    Done,
    Refused,
}

/// One end of a hello, as a state machine: bytes in, bytes out.
pub struct Handshake {
    credentials: Arc<Credentials>,
    topic: Topic,
    nonce: [u8; NONCE],
    is_caller: bool,
    stage: Stage,
    /// `Open` as it was sent or received, then `Answer`.
    said: [u8; OPEN + ANSWER],
    /// What is coming in.
    buffer: [u8; LONGEST],
    have: usize,
    /// What is to go out.
    out: [u8; LONGEST],
    out_at: usize,
    out_end: usize,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake")
            .field("topic", &self.topic)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

fn fresh() -> Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce)
        .map_err(|e| Error::io("asking the system for random bytes", io::Error::other(e)))?;
    Ok(nonce)
}

impl Handshake {
    /// The caller's end. Errors: `Io` if the system gives no random bytes.
    pub fn call(credentials: Arc<Credentials>, topic: Topic) -> Result<Self> {
        Ok(Self::call_with(credentials, topic, fresh()?))
    }

    /// The listener's end: `topic`'s `from` is not looked at and becomes what the caller says. Errors: as [`call`](Self::call).
    pub fn listen(credentials: Arc<Credentials>, topic: Topic) -> Result<Self> {
        Ok(Self::listen_with(credentials, topic, fresh()?))
    }

    fn call_with(credentials: Arc<Credentials>, topic: Topic, nonce: [u8; NONCE]) -> Self {
        let mut handshake = Self::new(credentials, topic, nonce, Stage::Answer);
        let mut open = [0; OPEN];
        let mut put = Put(&mut open);
        put.bytes(&header(KIND_OPEN));
        put.bytes(&handshake.topic.encode());
        put.bytes(&nonce);
        handshake.keep_open(&open);
        handshake.send(&open);
        handshake
    }

    fn listen_with(credentials: Arc<Credentials>, topic: Topic, nonce: [u8; NONCE]) -> Self {
        Self::new(credentials, topic, nonce, Stage::Open)
    }

    fn new(credentials: Arc<Credentials>, topic: Topic, nonce: [u8; NONCE], stage: Stage) -> Self {
        Self {
            topic: Topic {
                encrypted: credentials.encrypts(),
                ..topic
            },
            credentials,
            nonce,
            is_caller: stage == Stage::Answer,
            stage,
            said: [0; OPEN + ANSWER],
            buffer: [0; LONGEST],
            have: 0,
            out: [0; LONGEST],
            out_at: 0,
            out_end: 0,
        }
    }

    /// Both ends have proved themselves, as far as this one can see, and all is sent.
    pub fn is_done(&self) -> bool {
        self.stage == Stage::Done && self.outgoing().is_empty()
    }

    /// Once the hello is done: what seals what this end sends, and what opens what comes in. `None` if the connection is not encrypted (see
    /// [`Credentials::encrypts`]).
    ///
    /// # Errors
    /// None that is known.
    pub fn into_records(self) -> std::result::Result<Option<(Sealer, Opener)>, NotAuthentic> {
        if !self.topic.encrypted || self.stage != Stage::Done {
            return Ok(None);
        }
        let (open, answer) = self.said.split_at(OPEN);
        let mut salt = [0; 2 * NONCE];
        let mut put = Put(&mut salt);
        put.bytes(open.get(OPEN - NONCE..).unwrap_or_default());
        put.bytes(answer.get(HEADER..HEADER + NONCE).unwrap_or_default());
        let mut job = [0; JOB];
        Put(&mut job).bytes(self.credentials.job().as_bytes());
        let secret = self.credentials.secret().key();
        let [caller, listener] = records::keys(secret, &salt, &[&job, &self.said], RECORDS)?;
        let (own, theirs) = match self.is_caller {
            true => (caller, listener),
            false => (listener, caller),
        };
        Ok(Some((Sealer::new(own)?, Opener::new(theirs)?)))
    }

    /// What the connection is for.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// What is to be sent; after a refusal, the message that says so.
    pub fn outgoing(&self) -> &[u8] {
        self.out.get(self.out_at..self.out_end).unwrap_or_default()
    }

    /// `n` bytes of [`outgoing`](Self::outgoing) were sent.
    pub fn sent(&mut self, n: usize) {
        self.out_at = (self.out_at + n).min(self.out_end);
    }

    /// Where the next bytes that come in belong; empty if none is expected. It never reaches beyond the hello: what follows is not its business.
    pub fn room(&mut self) -> &mut [u8] {
        let end = match self.stage {
            Stage::Done | Stage::Refused => 0,
            // The header first: a refusal has nothing more.
            _ if self.have < HEADER => HEADER,
            Stage::Open => OPEN,
            Stage::Answer => ANSWER,
            Stage::Proof => PROOF,
        };
        self.buffer.get_mut(self.have..end).unwrap_or_default()
    }

    /// `n` bytes came in and were put into [`room`](Self::room).
    ///
    /// Errors: the refusal. Then [`outgoing`](Self::outgoing) tells the other end, and the connection is to be closed.
    pub fn received(&mut self, n: usize) -> std::result::Result<(), Refused> {
        self.have = (self.have + n).min(LONGEST);
        let have = self.buffer.get(..self.have).unwrap_or_default();
        if !have.is_empty() && !may_be_hello(have) {
            return self.refuse(Reason::NoHello);
        }
        let Some(bytes) = have.first_chunk::<HEADER>() else {
            return Ok(());
        };
        let Some(header) = Header::decode(bytes) else {
            return self.refuse(Reason::NoHello);
        };
        if header.version != VERSION {
            return self.refuse(Reason::OtherVersion);
        }
        if header.kind == KIND_REFUSAL {
            let reason = Reason::from_code(header.reason).unwrap_or(Reason::WrongProof);
            self.stage = Stage::Refused;
            return Err(self.refused(reason, true));
        }
        let expected = match self.stage {
            Stage::Open => KIND_OPEN,
            Stage::Answer => KIND_ANSWER,
            Stage::Proof => KIND_PROOF,
            Stage::Done | Stage::Refused => return Ok(()),
        };
        if (header.kind, header.reason) != (expected, 0) {
            return self.refuse(Reason::NoHello);
        }
        if !self.room().is_empty() {
            return Ok(());
        }
        let message = self.buffer;
        self.have = 0;
        match self.stage {
            Stage::Open => self.opened(&message),
            Stage::Answer => self.answered(&message),
            _ => self.proved(&message),
        }
    }

    fn opened(&mut self, open: &[u8; OPEN]) -> std::result::Result<(), Refused> {
        let mut take = Take(open);
        let _: [u8; HEADER] = take.bytes();
        let theirs = Topic::decode(&take.bytes());
        let own = Topic {
            from: theirs.from,
            ..self.topic
        };
        if theirs.encrypted != own.encrypted {
            return self.refuse(Reason::Encryption);
        }
        if theirs != own {
            let refused = self.refuse(Reason::OtherTopic);
            return refused.map_err(|r| Refused {
                topics: Some((theirs, own)),
                ..r
            });
        }
        self.topic = theirs;
        self.keep_open(open);
        let mut answer = [0; ANSWER];
        let mut put = Put(&mut answer);
        put.bytes(&header(KIND_ANSWER));
        put.bytes(&self.nonce);
        let Some((said, mac)) = answer.split_last_chunk_mut::<MAC>() else {
            return self.refuse(Reason::NoHello);
        };
        *mac = *self.mac(&LISTENER, said).as_bytes();
        self.keep_answer(&answer);
        self.send(&answer);
        self.stage = Stage::Proof;
        Ok(())
    }

    fn answered(&mut self, answer: &[u8; ANSWER]) -> std::result::Result<(), Refused> {
        let Some((said, mac)) = answer.split_last_chunk::<MAC>() else {
            return self.refuse(Reason::NoHello);
        };
        // Constant-time, as all comparisons of a `blake3::Hash`.
        if self.mac(&LISTENER, said) != *mac {
            return self.refuse(Reason::WrongProof);
        }
        self.keep_answer(answer);
        let mut proof = [0; PROOF];
        let mut put = Put(&mut proof);
        put.bytes(&header(KIND_PROOF));
        put.bytes(self.mac(&CALLER, answer).as_bytes());
        self.send(&proof);
        self.stage = Stage::Done;
        Ok(())
    }

    fn proved(&mut self, message: &[u8; LONGEST]) -> std::result::Result<(), Refused> {
        let mut take = Take(message);
        let _: [u8; HEADER] = take.bytes();
        let mac: [u8; MAC] = take.bytes();
        let mut answer = [0; ANSWER];
        Put(&mut answer).bytes(self.said.get(OPEN..).unwrap_or_default());
        if self.mac(&CALLER, &answer) != mac {
            return self.refuse(Reason::WrongProof);
        }
        self.stage = Stage::Done;
        Ok(())
    }

    /// The proof of the end `label`: over the job, `Open` and what of `Answer` comes before the proof.
    fn mac(&self, label: &[u8; 16], answer: &[u8]) -> blake3::Hash {
        let key = blake3::derive_key(KEY, self.credentials.secret().key());
        let mut job = [0; JOB];
        Put(&mut job).bytes(self.credentials.job().as_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&key);
        hasher.update(label);
        hasher.update(&job);
        hasher.update(self.said.get(..OPEN).unwrap_or_default());
        hasher.update(answer);
        hasher.finalize()
    }

    fn keep_open(&mut self, open: &[u8; OPEN]) {
        Put(&mut self.said).bytes(open);
    }

    fn keep_answer(&mut self, answer: &[u8; ANSWER]) {
        Put(self.said.get_mut(OPEN..).unwrap_or_default()).bytes(answer);
    }

    fn send(&mut self, message: &[u8]) {
        Put(&mut self.out).bytes(message);
        (self.out_at, self.out_end) = (0, message.len().min(LONGEST));
    }

    fn refused(&self, reason: Reason, told: bool) -> Refused {
        Refused {
            reason,
            told,
            job: Some(self.credentials.job().to_owned()),
            topics: None,
        }
    }

    fn refuse(&mut self, reason: Reason) -> std::result::Result<(), Refused> {
        self.stage = Stage::Refused;
        self.send(&refusal(reason));
        Err(self.refused(reason, false))
    }

    /// Moves the hello on over `stream`: until it is done (true), or the stream says `WouldBlock` (false; call again once it is ready). On a stream
    /// whose reads and writes end by a deadline it is all there is to do.
    ///
    /// # Errors
    /// `PermissionDenied` if one end refuses the other: see [`Refused::of`]. The other end is told, if it takes that at once. `UnexpectedEof` if the
    /// connection ends before; what else the stream says.
    pub fn advance(&mut self, stream: &mut (impl Read + Write)) -> io::Result<bool> {
        loop {
            while !self.outgoing().is_empty() {
                match stream.write(self.outgoing()) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => self.sent(n),
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(e) => return Err(e),
                }
            }
            if self.room().is_empty() {
                return match self.stage {
                    Stage::Done => Ok(true),
                    _ => Err(io::ErrorKind::ConnectionAborted.into()),
                };
            }
            match stream.read(self.room()) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the connection ended during the hello of the job's credentials",
                    ));
                }
                Ok(n) => self.received(n).inspect_err(|_| {
                    // A refusal is short, and the socket's buffer is empty.
                    let _ = stream.write(self.outgoing());
                })?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }
}

fn header(kind: u8) -> [u8; HEADER] {
    Header {
        version: VERSION,
        kind,
        reason: 0,
    }
    .encode()
}

#[cfg(test)]
mod tests;
