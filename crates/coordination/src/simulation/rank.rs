//! A rank: the real client and the real [`Rank`], and a training that is played. Its state is a number that depends on all that was committed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result};
use protocol::QuorumResult;
use protocol::gather::RankRequest;
use protocol::rank::{Next, Rank, RankRules};
use tokio::sync::watch;

use super::Host;
use super::groups::{Offer, Place, Share};
use super::job::Job;
use super::random::{Random, mix};
use crate::channel::Way;
use crate::clock::{self, deadline_in};
use crate::{Cancel, CommitVote, ManagerClient, PushEvent, QuorumRequest, is_refused};

/// For one connect, one reduction, one vote.
const CALL: Duration = Duration::from_secs(10);
/// For a quorum.
const QUORUM: Duration = Duration::from_secs(40);

/// As the manager has it: a server that refuses connections for so long has ended.
const GONE: Duration = Duration::from_secs(1);

/// What a rank is started with.
pub(super) struct Start {
    pub(super) job: Arc<Job>,
    pub(super) host: Host,
    pub(super) slot: usize,
    pub(super) replica: String,
    pub(super) server: String,
    pub(super) group_rank: u32,
    pub(super) random: Random,
    /// Until then the training thread hangs.
    pub(super) hangs: watch::Receiver<Option<Instant>>,
}

struct Training {
    at: Start,
    client: ManagerClient,
    rank: Rank,
    value: u64,
    stamp: Arc<AtomicU64>,
    aborted: watch::Receiver<Option<(Epoch, String)>>,
    /// The epoch of its group, and why that cannot be used.
    group: Option<Epoch>,
    broken: Option<String>,
}

/// Trains until the replica ends. Errors: why this rank has ended.
pub(super) async fn train(at: Start) -> Result<()> {
    let way = Way {
        host: Some(at.host.clone()),
        ..Way::default()
    };
    let client = ManagerClient::lazily(&at.server, &way)?;
    let (told, aborted) = watch::channel(None);
    let callback = move |event| {
        if let PushEvent::AbortEpoch {
            quorum_id, reason, ..
        } = event
        {
            told.send_replace(Some((quorum_id, reason)));
        }
    };
    let _watch = client.watch(at.group_rank, Arc::new(callback));
    let stamp = Arc::new(AtomicU64::new(1));
    let _progress = client.progress(at.group_rank, stamp.clone(), Duration::from_secs(2));
    let rules = RankRules {
        min_replicas: at.job.scenario.min_replicas as u32,
        init_sync: at.job.scenario.init_sync,
        ..RankRules::default()
    };
    let value = match rules.init_sync {
        true => mix(at.job.now().as_nanos() as u64 ^ at.slot as u64),
        false => 7,
    };
    let mut training = Training {
        at,
        client,
        rank: Rank::new(rules),
        value: value ^ 1,
        stamp,
        aborted,
        group: None,
        broken: None,
    };
    loop {
        training.attempt().await?;
    }
}

impl Training {
    fn who(&self) -> String {
        format!("rank {} of {}", self.at.group_rank, self.at.replica)
    }

    fn check(&self, outcome: std::result::Result<(), String>) -> Result<()> {
        outcome.map_err(|text| self.violate(text))
    }

    fn violate(&self, text: String) -> Error {
        self.at.job.violate(text.clone());
        Error::new(ErrorKind::Internal, text)
    }

    /// The training thread does something.
    async fn moves(&mut self) {
        let until = *self.at.hangs.borrow();
        if let Some(until) = until {
            tokio::time::sleep_until(until.into()).await;
        }
        self.stamp.fetch_add(1, Ordering::Relaxed);
    }

    fn why_broken(&self) -> Option<String> {
        let aborted = self.aborted.borrow();
        let over = aborted.as_ref().filter(|(e, _)| Some(*e) >= self.rank.epoch());
        self.broken.clone().or_else(|| over.map(|(_, why)| why.clone()))
    }

    /// Ready once an epoch that is not older than this is aborted.
    async fn over(aborted: &mut watch::Receiver<Option<(Epoch, String)>>, epoch: Epoch) -> Error {
        let told = aborted
            .wait_for(|a| a.as_ref().is_some_and(|(e, _)| *e >= epoch))
            .await;
        let why = told
            .ok()
            .and_then(|told| told.as_ref().map(|(_, why)| why.clone()));
        match why {
            Some(why) => Error::new(ErrorKind::Aborted, why),
            None => std::future::pending().await,
        }
    }

    async fn attempt(&mut self) -> Result<()> {
        self.moves().await;
        let request = self.rank.start(self.why_broken().is_some());
        // As the manager does: epochs that keep failing at once must not become a busy loop.
        if let Some(doublings) = (self.rank.commit_failures() as u32).checked_sub(3) {
            tokio::time::sleep(Duration::from_millis(10 << doublings.min(6))).await;
        }
        let Some(answer) = self.ask(&request).await? else {
            return Ok(());
        };
        let told = self.at.job.checks().told(
            &self.at.replica,
            &self.rank,
            &answer,
            self.at.job.scenario.min_replicas,
        );
        self.check(told)?;
        let mut next = self.rank.answered(answer.clone(), self.why_broken());
        let error = loop {
            next = match next {
                Next::Offer { publish, .. } => {
                    if publish {
                        self.offer(&answer);
                    }
                    self.rank.offered(Ok(()))
                }
                Next::Configure => {
                    let outcome = self.connect(&answer).await;
                    self.rank.configured(outcome, self.why_broken())
                }
                Next::Heal => {
                    let outcome = self.fetch(&answer).await;
                    let next = self.rank.healed(outcome);
                    self.state_holds()?;
                    next
                }
                Next::Fetch => {
                    let outcome = self.fetch(&answer).await;
                    let next = self.rank.fetched(outcome);
                    self.state_holds()?;
                    next
                }
                Next::Ask => return Ok(()),
                Next::Ready => break None,
                Next::Lost(error) => break Some(error),
                Next::End(error)
                    if error.kind() == ErrorKind::InvalidState
                        && self.at.job.checks().has_none(&self.at.replica) =>
                {
                    return Err(error);
                }
                Next::End(error) => {
                    return Err(self.violate(format!("{} ends for good: {error}", self.who())));
                }
            };
        };
        self.finish(&answer, error).await
    }

    /// The quorum; `None` if the program is to call anew. Errors: the replica has ended.
    async fn ask(&mut self, request: &RankRequest) -> Result<Option<QuorumResult>> {
        let request = QuorumRequest {
            group_rank: self.at.group_rank,
            step: request.step,
            checkpoint_metadata: "played".into(),
            shrink_only: request.shrink_only,
            init_sync: request.init_sync,
            commit_failures: request.commit_failures,
            lineage: request.lineage.clone(),
            last_quorum_id: request.last_quorum_id,
            healed: request.healed,
            batches_committed: request.batches_committed,
            question: request.question,
            joining: request.joining,
            is_last: request.is_last,
        };
        let deadline = deadline_in(QUORUM);
        let mut pause = Duration::from_millis(20);
        let mut refused = None;
        loop {
            let asked = self.client.ask(&request, deadline, &Cancel::default());
            let error = match asked.await {
                Ok(answer) => {
                    self.stamp.fetch_add(1, Ordering::Relaxed);
                    return Ok(Some(answer));
                }
                Err(error) => error,
            };
            self.at
                .job
                .note(|| format!("{} gets no quorum: {error}", self.who()));
            if error.kind() == ErrorKind::Conflict {
                let (at, epoch) = (&self.at, self.rank.epoch());
                let may_be = at.job.checks().may_be_refused(&at.replica, epoch);
                if !may_be {
                    return Err(self.violate(format!(
                        "{} is refused although it would heal: {error}",
                        self.who()
                    )));
                }
            }
            if matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Conflict) {
                return Err(error);
            }
            if !error.is_retryable() {
                return Err(self.violate(format!("{} ends for good: {error}", self.who())));
            }
            refused = is_refused(&error).then(|| refused.unwrap_or_else(clock::now));
            if refused.is_some_and(|since| clock::now() >= since + GONE) {
                return Err(Error::new(ErrorKind::PeerLost, "rank 0 is gone"));
            }
            if error.kind() == ErrorKind::Timeout || clock::time_left(deadline) <= pause {
                return Ok(None);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    fn offer(&self, answer: &QuorumResult) {
        let offer = Offer {
            epoch: answer.quorum_id,
            step: answer.max_step,
            value: self.value,
            lineage: self.rank.lineage().clone(),
            host: self.at.host.name().to_string(),
        };
        let groups = &self.at.job.groups;
        groups.offer(&self.at.replica, self.at.group_rank, offer);
    }

    fn place(&self, answer: &QuorumResult) -> Place {
        Place {
            epoch: answer.quorum_id,
            group_rank: self.at.group_rank,
            rank: answer.replica_rank,
            world: answer.replica_world_size,
            host: self.at.host.name().to_string(),
        }
    }

    fn give_up_group(&mut self, why: &str) {
        if let Some(epoch) = self.group {
            self.at.job.groups.leave(self.at.host.name(), Some(epoch), why);
        }
        self.broken.get_or_insert_with(|| why.to_string());
    }

    async fn connect(&mut self, answer: &QuorumResult) -> Result<()> {
        self.give_up_group("it connects anew");
        (self.group, self.broken) = (Some(answer.quorum_id), None);
        let (place, job) = (self.place(answer), self.at.job.clone());
        let connected = tokio::select! {
            biased;
            connected = job.groups.connect(&place, deadline_in(CALL)) => connected,
            error = Self::over(&mut self.aborted, answer.quorum_id) => Err(error),
        };
        if let Err(error) = &connected {
            self.give_up_group(error.message());
        }
        connected
    }

    async fn fetch(&mut self, answer: &QuorumResult) -> Result<protocol::Lineage> {
        let name = |source: &protocol::assignment::RecoverySource| match answer
            .replica_ids
            .get(source.replica_rank as usize)
        {
            Some(id) if source.replica_id.is_empty() => id.clone(),
            _ => source.replica_id.clone(),
        };
        let sources: Vec<String> = answer.recover_sources.iter().map(name).collect();
        tokio::time::sleep(self.at.random.millis(5..200)).await;
        let (job, what) = (self.at.job.clone(), (answer.quorum_id, answer.max_step));
        let host = self.at.host.name();
        let fetched = tokio::select! {
            biased;
            fetched = job.groups.fetch(host, &sources, self.at.group_rank, what, deadline_in(CALL)) => fetched,
            error = Self::over(&mut self.aborted, answer.quorum_id) => Err(error),
        };
        let offer = fetched?;
        if !answer.lineage.is_empty() && offer.lineage.as_str() != answer.lineage {
            return Err(Error::new(ErrorKind::Protocol, "a source of another history"));
        }
        self.value = offer.value;
        self.stamp.fetch_add(1, Ordering::Relaxed);
        Ok(offer.lineage)
    }

    fn state_holds(&self) -> Result<()> {
        let (at, job) = (&self.at, &self.at.job);
        let held = job
            .checks()
            .state(&at.replica, at.group_rank, &self.rank, self.value);
        self.check(held)
    }

    /// Computes, reduces and votes.
    async fn finish(&mut self, answer: &QuorumResult, lost: Option<Error>) -> Result<()> {
        let mut error = lost;
        let mut reduced = None;
        if error.is_none() {
            tokio::time::sleep(self.at.random.millis(200..700)).await;
            self.moves().await;
            match self.reduce(answer).await? {
                Ok(result) => reduced = Some(result),
                Err(e) => error = Some(e),
            }
        }
        if let Some(error) = &error {
            self.at
                .job
                .note(|| format!("{} loses step {}: {error}", self.who(), answer.max_step));
            self.give_up_group(error.message());
        }
        let vote = match self
            .rank
            .vote(error, reduced.map(|(_, contributors)| contributors))
        {
            Ok(vote) => vote,
            Err(error) => return Err(self.violate(format!("{} ends for good: {error}", self.who()))),
        };
        let key = vote.key;
        let cast = CommitVote {
            group_rank: self.at.group_rank,
            step: key.step,
            quorum_id: key.quorum_id,
            attempt: key.attempt,
            vote: vote.against.is_none(),
        };
        let decision = self.decision(&cast).await?;
        if let Some(commit) = decision {
            let key = (key.quorum_id, key.step, key.attempt);
            let same = self.at.job.checks().decided(&self.at.replica, key, commit);
            self.check(same)?;
        }
        if let (Some(true), Some((result, _))) = (decision, reduced) {
            self.value = mix(self.value ^ result);
        }
        self.rank.decided(decision)?;
        self.state_holds()?;
        if decision == Some(true) {
            self.at.job.committed(self.at.slot, self.at.group_rank);
            self.at.job.note(|| {
                format!(
                    "{} commits step {} in epoch {}",
                    self.who(),
                    key.step,
                    key.quorum_id
                )
            });
        }
        Ok(())
    }

    async fn reduce(&mut self, answer: &QuorumResult) -> Result<Result<(u64, u32)>> {
        let step = answer.max_step;
        let share = Share {
            contributes: self.rank.contribution().0.is_some(),
            state: self.value,
            work: mix(self.value ^ mix(step.0 as u64) ^ mix(1 + self.at.slot as u64)),
        };
        let (place, job) = (self.place(answer), self.at.job.clone());
        let outcome = tokio::select! {
            biased;
            reduced = job.groups.reduce(&place, step, share, deadline_in(CALL)) => reduced,
            error = Self::over(&mut self.aborted, answer.quorum_id) => Err(error),
        };
        match outcome {
            Ok(Ok(result)) => Ok(Ok(result)),
            Ok(Err(text)) => Err(self.violate(text)),
            Err(error) => Ok(Err(error)),
        }
    }

    /// The replica's decision; `None` if it is not heard in time. Errors: the replica has ended.
    async fn decision(&mut self, vote: &CommitVote) -> Result<Option<bool>> {
        let deadline = deadline_in(CALL);
        let mut pause = Duration::from_millis(20);
        loop {
            let error = match self.client.cast(vote, String::new(), deadline).await {
                Ok(commit) => return Ok(Some(commit)),
                Err(error) => error,
            };
            self.at
                .job
                .note(|| format!("{} hears no decision: {error}", self.who()));
            match error.kind() {
                ErrorKind::PeerLost | ErrorKind::Conflict => return Err(error),
                // Its answer was lost: it is cast again.
                ErrorKind::Unavailable if clock::time_left(deadline) > pause => {}
                _ => return Ok(None),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }
}
