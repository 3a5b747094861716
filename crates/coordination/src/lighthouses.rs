//! Where a client finds the lighthouse: one address, or several lighthouses of which one leads.
//!
//! Only the leading one answers; the others refuse with `Unavailable`. A client remembers which one answered last, and goes on to the next in its
//! list when that one is gone or leads no more. It never follows an address that is not in its list.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};
use identity::{Party, Refusal, Role};
use tokio::runtime::Handle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response};

use crate::channel::{self, Backoff, Way, call, reach, wait_for};
use crate::clock::{self, time_left};
use crate::wire::is_elsewhere;

/// What to do when no lighthouse is reached.
const HINT: &str = "is the lighthouse running? start it with `oxccl lighthouse`";
/// How long connecting to one of several may take.
const CONNECT: Duration = Duration::from_secs(1);

/// One lighthouse.
#[derive(Debug, Clone)]
pub(crate) struct Lighthouse {
    at: usize,
    pub(crate) url: String,
    pub(crate) channel: Channel,
}

/// The lighthouses of a job.
#[derive(Debug)]
pub(crate) struct Lighthouses {
    all: Vec<Lighthouse>,
    /// The one that is asked first.
    current: AtomicUsize,
    /// The addresses as they were given.
    list: String,
    way: Way,
}

impl Lighthouses {
    /// Reaches one of the lighthouses in `list` (URLs, separated by commas) as `party`, trying again until `deadline`.
    ///
    /// Errors: `InvalidArgument` for the list; `Unavailable` with the addresses and the last failure.
    pub(crate) fn reach(
        handle: &Handle,
        party: Option<Arc<Party>>,
        list: &str,
        deadline: Instant,
    ) -> Result<Self> {
        let way = Way::new(party, Some(Role::Lighthouse));
        let urls: Vec<&str> = list.split(',').map(str::trim).collect();
        if let [url] = urls.as_slice() {
            let channel = reach(handle, url, way.clone(), ("lighthouse", HINT), deadline)?;
            return Ok(Self::of(vec![channel], way, &urls, list, 0));
        }
        let endpoints = urls
            .iter()
            .map(|url| Ok(channel::endpoint(url, &way)?.connect_timeout(CONNECT)));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        let (attempts, addresses) = (
            first_reached(endpoints.clone(), way.clone(), deadline),
            list.to_string(),
        );
        let start = clock::now();
        let unreached = move |last: &str| {
            let waited = start.elapsed().as_secs_f64();
            let text =
                format!("cannot reach a lighthouse at {addresses} within {waited:.1} s ({last}); {HINT}");
            Error::new(ErrorKind::Unavailable, text)
        };
        let found = wait_for(handle, "connect", deadline, attempts);
        let at = found.map_err(|e| match e.kind() {
            ErrorKind::Timeout => unreached("no answer"),
            _ => unreached(e.message()),
        })?;
        let _guard = handle.enter();
        let channels = endpoints.iter().map(|e| way.connect_lazily(e)).collect();
        Ok(Self::of(channels, way, &urls, list, at))
    }

    /// A single one, connected with the first call.
    #[cfg(test)]
    pub(crate) fn lazily(way: Way, url: &str) -> Result<Self> {
        let channel = way.connect_lazily(&channel::endpoint(url, &way)?);
        Ok(Self::of(vec![channel], way, &[url], url, 0))
    }

    fn of(channels: Vec<Channel>, way: Way, urls: &[&str], list: &str, current: usize) -> Self {
        let all = channels.into_iter().zip(urls).enumerate();
        let one = |(at, (channel, url)): (usize, (Channel, &&str))| Lighthouse {
            at,
            url: (*url).to_string(),
            channel,
        };
        Self {
            all: all.map(one).collect(),
            current: AtomicUsize::new(current),
            list: list.to_string(),
            way,
        }
    }

    /// As whom they are called.
    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// All addresses, for messages.
    pub(crate) fn list(&self) -> &str {
        &self.list
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// The one that is asked first.
    pub(crate) fn current(&self) -> Result<Lighthouse> {
        let at = self.current.load(Ordering::Relaxed);
        let none = || Error::new(ErrorKind::Internal, "there is no lighthouse in the list");
        self.all.get(at).cloned().ok_or_else(none)
    }

    /// `from` does not lead: the next one is asked from now on, unless another call has gone on already.
    pub(crate) fn go_on(&self, from: &Lighthouse) {
        let next = (from.at + 1) % self.all.len().max(1);
        let _ = self
            .current
            .compare_exchange(from.at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// One call with a deadline. A single lighthouse is asked once; of several one after another, until one answers.
    ///
    /// Errors: what the leading lighthouse says; of several, `Unavailable` if none leads until the deadline.
    pub(crate) async fn call<T, R, F>(
        &self,
        op: &'static str,
        deadline: Instant,
        message: T,
        rpc: impl Fn(Channel, Request<T>) -> F,
    ) -> Result<R>
    where
        T: Clone,
        F: Future<Output = Result<Response<R>, tonic::Status>>,
    {
        let mut search = Search::new(self.count());
        loop {
            let asked = self.current()?;
            let mut is_other = false;
            let answer = call(op, &asked.url, deadline, message.clone(), |request| {
                let (answer, is_other) = (rpc(asked.channel.clone(), request), &mut is_other);
                async move {
                    let answer = answer.await;
                    *is_other = answer.as_ref().is_err_and(is_elsewhere);
                    answer
                }
            })
            .await;
            let error = match answer {
                Err(error) if is_other && self.count() > 1 => error,
                answer => return answer,
            };
            self.go_on(&asked);
            let pause = search.next();
            if time_left(deadline) <= pause {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// The pauses of one who looks for the leading lighthouse: none before each was asked, then a growing one after each round.
#[derive(Debug)]
pub(crate) struct Search {
    count: usize,
    asked: usize,
    backoff: Backoff,
}

impl Search {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            count,
            asked: 0,
            backoff: Backoff::new(),
        }
    }

    /// The pause after one lighthouse more was asked in vain.
    pub(crate) fn next(&mut self) -> Duration {
        self.asked += 1;
        if self.asked < self.count {
            return Duration::ZERO;
        }
        self.asked = 0;
        self.backoff.next()
    }

    /// It was found.
    pub(crate) fn reset(&mut self) {
        self.asked = 0;
        self.backoff.reset();
    }
}

/// The first of these that can be connected to; no round more if every one of them refuses who this process is. Errors: `Unavailable` with the last
/// failure.
async fn first_reached(endpoints: Vec<Endpoint>, way: Way, deadline: Instant) -> Result<usize> {
    let mut search = Search::new(endpoints.len());
    let (mut last, mut refusals) = (String::from("no answer"), 0);
    for (at, endpoint) in endpoints.iter().enumerate().cycle() {
        let attempt = tokio::time::timeout_at(deadline.into(), way.connect(endpoint)).await;
        let refused = matches!(&attempt, Ok(Err(e)) if Refusal::is_in(e));
        refusals = if refused { refusals + 1 } else { 0 };
        match attempt {
            Ok(Ok(_)) => return Ok(at),
            Ok(Err(e)) => last = format!("{}: {}", endpoint.uri(), channel::chain(&e)),
            Err(_) => {}
        }
        let pause = search.next();
        if time_left(deadline) <= pause || refusals == endpoints.len() {
            break;
        }
        tokio::time::sleep(pause).await;
    }
    Err(Error::new(ErrorKind::Unavailable, last))
}
