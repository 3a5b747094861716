//! What runs on the hosts: a lighthouse, and replicas with a manager server beside their rank 0. Each is started again some time after its end, as
//! a launcher does.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Host;
use super::disk::Plate;
use super::job::Job;
use super::random::{Random, mix};
use super::rank::{Start, train};
use crate::channel::Way;
use crate::lighthouse::journal::Journal;
use crate::lighthouses::Lighthouses;
use crate::manager::uplink::Uplink;
use crate::serve::answer::Answers;
use crate::{ConnectionLimits, LighthouseConfig, ManagerServerConfig, lighthouse, manager, serve};

pub(super) const LIGHTHOUSE: &str = "lighthouse";
/// Longer than the simulated transfers and reductions may take.
const PROGRESS: Duration = Duration::from_secs(15);
pub(super) const HEARTBEAT: Duration = Duration::from_secs(5);

/// The host of a rank; the manager server is on that of rank 0.
pub(super) fn host_of(slot: usize, group_rank: u32) -> String {
    match group_rank {
        0 => format!("r{slot}"),
        _ => format!("r{slot}-{group_rank}"),
    }
}

/// What ends when it is dropped.
struct Ends(JoinHandle<()>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn serves<A: Answers>(listener: super::Listener, routes: Arc<A>, limits: ConnectionLimits) -> Ends {
    let (stop, stopped) = watch::channel(false);
    Ends(tokio::spawn(async move {
        let _stop = stop;
        serve::serve_simulated(listener, routes, limits, stopped).await;
    }))
}

/// Starts a lighthouse; it ends when what comes back is dropped, and its host with it.
pub(super) fn start_lighthouse(job: &Job, disk: &Plate, accept_rollback: bool) -> impl Send + use<> {
    let config = LighthouseConfig {
        min_replicas: job.scenario.min_replicas,
        join_timeout: Duration::from_secs(4),
        heartbeat_timeout: HEARTBEAT,
        accept_rollback,
        ..LighthouseConfig::default()
    };
    let host = job.net.start(LIGHTHOUSE);
    let (journal, record) = match job.scenario.has_disk {
        true => (Journal::Simulated(disk.of(host.clone())), disk.record()),
        false => (Journal::Nowhere, None),
    };
    let recorded = record.as_ref().filter(|r| !r.members.is_empty());
    job.checks().lighthouse_starts(recorded.map(|r| r.quorum_id));
    let (routes, keeps) = lighthouse::simulated(&config, record, journal);
    let limits = ConnectionLimits {
        silence: HEARTBEAT,
        ..ConnectionLimits::lighthouse()
    };
    (serves(host.listen(), routes, limits), keeps)
}

/// The present incarnation of a replica, for the faults.
#[derive(Debug, Default)]
pub(super) struct Running {
    ranks: Vec<tokio::task::AbortHandle>,
    uplink: Option<Uplink>,
    hangs: Vec<watch::Sender<Option<Instant>>>,
}

impl Running {
    pub(super) fn hang(&self, group_rank: u32, until: Instant) {
        if let Some(hangs) = self.hangs.get(group_rank as usize) {
            hangs.send_replace(Some(until));
        }
    }

    /// Its event stream to the lighthouse is open.
    pub(super) fn is_attached(&self) -> bool {
        self.uplink.as_ref().is_some_and(Uplink::is_attached)
    }

    /// The process of a rank ends. Its host is to end before: what it says in its last moment is not heard.
    pub(super) fn kill(&self, group_rank: u32) {
        if let Some(rank) = self.ranks.get(group_rank as usize) {
            rank.abort();
        }
    }
}

/// The incarnations of one replica.
pub(super) async fn live(job: Arc<Job>, slot: usize, mut random: Random) {
    for incarnation in 1.. {
        tokio::time::sleep(random.millis(0..1500)).await;
        let replica = format!("r{slot}:{incarnation}");
        job.note(|| format!("{replica} starts"));
        if let Err(error) = run(&job, slot, &replica, &mut random).await {
            job.violate(format!("{replica} cannot start: {error}"));
            return;
        }
        if job.is_lost_for_good(slot) {
            return;
        }
    }
}

async fn run(job: &Arc<Job>, slot: usize, replica: &str, random: &mut Random) -> ftcore::Result<()> {
    let ranks = job.scenario.ranks;
    let hosts: Vec<Host> = (0..ranks)
        .map(|rank| job.net.start(&host_of(slot, rank)))
        .collect();
    let server = format!("http://{}:1", host_of(slot, 0));
    let config = ManagerServerConfig {
        replica_id: replica.to_string(),
        store_address: format!("{}:2", host_of(slot, 0)),
        world_size: ranks,
        progress_timeout: PROGRESS,
        heartbeat_interval: Duration::from_millis(900),
        ..ManagerServerConfig::default()
    };
    let way = Way {
        host: hosts.first().cloned(),
        ..Way::default()
    };
    let lighthouses = Lighthouses::lazily(way, &format!("http://{LIGHTHOUSE}:1"))?;
    let (manager, routes) = manager::begin(&config, lighthouses, server.clone());
    let uplink = manager.uplink.clone();
    drop(manager);
    let mut tasks: Vec<JoinHandle<ftcore::Result<()>>> = Vec::new();
    let mut hangs = Vec::new();
    let mut served = None;
    for (group_rank, host) in (0..).zip(&hosts) {
        if group_rank == 0 {
            served = Some(serves(
                host.listen(),
                Arc::new(routes.clone()),
                config.limits.clone(),
            ));
        }
        let (hang, hung) = watch::channel(None);
        hangs.push(hang);
        tasks.push(tokio::spawn(train(Start {
            job: job.clone(),
            host: host.clone(),
            slot,
            replica: replica.to_string(),
            server: server.clone(),
            group_rank,
            random: random.split(),
            hangs: hung,
        })));
    }
    drop(routes);
    *job.running(slot) = Running {
        ranks: tasks.iter().map(JoinHandle::abort_handle).collect(),
        uplink: Some(uplink.clone()),
        hangs,
    };
    // The launcher sees the first end, and ends the others after a while.
    let first = first_end(&mut tasks).await;
    job.note(|| format!("{replica}: a rank has ended: {first}"));
    if job.scenario.spares_replicas() {
        job.violate(format!("{replica} ends without a reason: {first}"));
    }
    tokio::time::sleep(random.millis(0..6000)).await;
    for (group_rank, (task, host)) in (0..).zip(tasks.iter().zip(&hosts)) {
        job.end_host(host.name(), replica, group_rank, false);
        task.abort();
    }
    uplink.stop();
    drop(served);
    Ok(())
}

async fn first_end(tasks: &mut [JoinHandle<ftcore::Result<()>>]) -> String {
    std::future::poll_fn(|context| {
        for task in tasks.iter_mut() {
            if let std::task::Poll::Ready(end) = std::pin::Pin::new(task).poll(context) {
                return std::task::Poll::Ready(match end {
                    Ok(Err(error)) => error.to_string(),
                    Ok(Ok(())) => "it is done".to_string(),
                    Err(_) => "it was killed".to_string(),
                });
            }
        }
        std::task::Poll::Pending
    })
    .await
}

/// The first incarnation of a replica differs from seed to seed.
pub(super) fn random_of(seed: u64, slot: usize) -> Random {
    Random::new(mix(seed) ^ slot as u64)
}

/// Behind a lock, for the faults.
pub(super) type Slot = Mutex<Running>;

pub(super) fn lock(slot: &Slot) -> std::sync::MutexGuard<'_, Running> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
