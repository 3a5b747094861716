//! How the ranks of an epoch get one communicator: every rank shows up in the store, rank 0's unique id goes round, and the
//! library connects them.
//!
//! The library's own calls have no deadline, so they run on a thread that may be given up; what it makes too late, it
//! aborts itself.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::ftcore::{Configuration, Error, ErrorKind, Result, deadline_in, time_left};
use crate::raw::hccl::{CommHandle, UniqueId};
use crate::runtime::{Runtime, runtime};

/// How long to wait in one go before looking whether another rank failed or aborted.
const SLICE: Duration = Duration::from_millis(100);
/// What rank cards begin with; raised when their contents change.
const CARD_VERSION: u32 = 1;

/// An epoch's meeting place in the store.
struct Meeting<'a> {
    configuration: &'a Configuration,
    began: Instant,
}

impl Meeting<'_> {
    fn key(&self, name: &str) -> String {
        let c = self.configuration;
        format!("{}/hccl/{}/{name}", c.prefix, c.epoch)
    }

    /// Ends early if the group was aborted or another rank could not take part.
    fn check(&self) -> Result<()> {
        self.configuration.cancel.check()?;
        let store = &self.configuration.store;
        let key = self.key("failed");
        let soon = deadline_in(SLICE).min(self.configuration.deadline);
        // A store that does not answer is noticed by the waits themselves.
        if store.check(&[&key], soon).unwrap_or(false) {
            let text = store.get(&key, soon).unwrap_or_default();
            let text: String = String::from_utf8_lossy(&text).chars().take(500).collect();
            return Err(Error::new(
                ErrorKind::Backend,
                format!("another rank gave up: {text}"),
            ));
        }
        Ok(())
    }

    fn timed_out(&self, who: &str, phase: &str) -> Error {
        let waited = self.began.elapsed().as_secs_f64();
        let whole = self
            .configuration
            .deadline
            .saturating_duration_since(self.began)
            .as_secs_f64();
        Error::timeout(format!(
            "waiting for {who} in phase {phase}, {waited:.1} s of {whole:.1} s"
        ))
    }

    /// Waits for `name/<rank>` of every rank and gives the values.
    fn gather(&self, name: &str, phase: &str) -> Result<Vec<Vec<u8>>> {
        let c = self.configuration;
        let keys: Vec<String> = (0..c.world_size)
            .map(|r| self.key(&format!("{name}/{r}")))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        loop {
            match c.store.wait(&keys, deadline_in(SLICE).min(c.deadline)) {
                Ok(()) => return c.store.multi_get(&keys, c.deadline),
                Err(e) if e.kind() == ErrorKind::Timeout => {}
                Err(e) => return Err(e),
            }
            self.check()?;
            if time_left(c.deadline).is_zero() {
                return Err(self.timed_out(&self.missing(&keys), phase));
            }
        }
    }

    fn missing(&self, keys: &[&str]) -> String {
        let c = self.configuration;
        let soon = deadline_in(Duration::from_secs(1));
        let absent: Vec<String> = keys
            .iter()
            .zip(0u32..)
            .filter(|(key, _)| !c.store.check(&[key], soon).unwrap_or(false))
            .map(|(_, rank)| rank.to_string())
            .collect();
        match absent.as_slice() {
            [] => "the store".to_string(),
            [one] => format!("rank {one} of {}", c.world_size),
            several => format!("ranks {} of {}", several.join(", "), c.world_size),
        }
    }

    /// Runs `call` on a thread that is given up at the deadline. `late` gets what comes after that.
    fn bounded<T: Send + 'static>(
        &self,
        what: &str,
        phase: &str,
        call: impl FnOnce() -> Result<T> + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T> {
        let (give, take) = mpsc::sync_channel(0);
        std::thread::Builder::new()
            .name("ox-hccl-init".to_string())
            .spawn(move || {
                if let Err(mpsc::SendError(Ok(made))) = give.send(call()) {
                    late(made);
                }
            })
            .map_err(|e| Error::io("cannot start the thread ox-hccl-init", e))?;
        loop {
            match take.recv_timeout(SLICE.min(time_left(self.configuration.deadline))) {
                Ok(made) => return made,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        format!("{what} ended without a result"),
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.check()?;
            if time_left(self.configuration.deadline).is_zero() {
                let who = format!("{what}, which has not returned (every rank it needs was there)");
                return Err(self.timed_out(&who, phase));
            }
        }
    }

    /// World size and library version must agree (a card is untrusted, INV-10).
    fn compare(&self, cards: &[Vec<u8>], own: &[u8]) -> Result<()> {
        let words = |card: &[u8]| {
            let (chunks, rest) = card.as_chunks::<4>();
            match (chunks, rest) {
                ([card, world, version], []) => Some((
                    u32::from_le_bytes(*card),
                    u32::from_le_bytes(*world),
                    i32::from_le_bytes(*version),
                )),
                _ => None,
            }
        };
        let mut others = cards.iter().zip(0u32..);
        let Some((card, rank)) = others.find(|(card, _)| card.as_slice() != own) else {
            return Ok(());
        };
        let say = |card: &[u8]| match words(card) {
            Some((_, world, version)) => format!("a world of {world} and HCCL version {version}"),
            None => format!("a card of {} bytes that is not one of this plugin", card.len()),
        };
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {rank} came with {}, rank {} with {}",
                say(card),
                self.configuration.rank,
                say(own)
            ),
        )
        .with_peer(rank))
    }

    fn run(&self) -> Result<(&'static Runtime, Option<CommHandle>)> {
        let c = self.configuration;
        let runtime = self.bounded("the device", "acquire", runtime, |_| {})?;
        let mut card = CARD_VERSION.to_le_bytes().to_vec();
        card.extend(c.world_size.to_le_bytes());
        card.extend(runtime.libraries.hccl.version.to_le_bytes());
        if c.world_size == 1 {
            return Ok((runtime, None));
        }
        c.store
            .set(&self.key(&format!("card/{}", c.rank)), &card, c.deadline)?;
        self.compare(&self.gather("card", "meet")?, &card)?;
        let hccl = &runtime.libraries.hccl;
        let id_key = self.key("id/0");
        if c.rank == 0 {
            let id = self.bounded("hcclGetUniqueId", "identify", || hccl.unique_id(), |_| {})?;
            c.store.set(&id_key, &id.to_bytes(), c.deadline)?;
        }
        let id = loop {
            match c.store.get(&id_key, deadline_in(SLICE).min(c.deadline)) {
                Ok(id) => break UniqueId::from_bytes(&id)?,
                Err(e) if e.kind() == ErrorKind::Timeout => {}
                Err(e) => return Err(e),
            }
            self.check()?;
            if time_left(c.deadline).is_zero() {
                return Err(self.timed_out(
                    &format!("the unique id of rank 0 of {}", c.world_size),
                    "identify",
                ));
            }
        };
        let (world, rank) = (c.world_size, c.rank);
        let comm = self.bounded(
            "hcclCommInitRank",
            "connect",
            move || hccl.init_rank(id, world, rank),
            move |comm| {
                if let Err(error) = hccl.abort(comm) {
                    tracing::warn!(%error, "a communicator that came too late was not aborted");
                }
            },
        )?;
        Ok((runtime, Some(comm)))
    }
}

/// Makes the communicator of `configuration`; none for a world of one.
///
/// Errors: `Timeout` names the missing ranks (or the call that hangs) and the phase (L33); `Mismatch` if ranks disagree;
/// the reason of the token; `Backend` with the library's code.
pub(crate) fn connect(configuration: &Configuration) -> Result<(&'static Runtime, Option<CommHandle>)> {
    let meeting = Meeting {
        configuration,
        began: Instant::now(),
    };
    meeting.run().inspect_err(|error| {
        // Those who hit the same deadline find out by themselves; the others need not wait for theirs (L28).
        if !matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Aborted) && configuration.world_size > 1 {
            let text = format!("rank {}: {error}", configuration.rank);
            let told = configuration
                .store
                .set(&meeting.key("failed"), text.as_bytes(), deadline_in(SLICE));
            if let Err(error) = told {
                tracing::debug!(%error, "the other ranks were not told");
            }
        }
    })
}
