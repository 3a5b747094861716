//! How an engine ends: its peers are told, its work fails, and what was said and sent is seen on its way before the sockets close.

use std::os::fd::AsFd;
use std::time::Duration;

use ftcore::{Error, ErrorKind, deadline_in, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::Engine;
use crate::peer::NOTICE_TIME;
use crate::port::Port;
use crate::queue::{Drivable, Stop};
use crate::transport::tcp::{Link, Moved};
use crate::wire::{self, Control, ControlKind};

/// Reads of what a peer still says, at most, before its socket is closed.
const UNREAD: usize = 64;
/// How long a rank that leaves without a deadline sees what it has sent last on its way, at most.
const LEAVING: Duration = Duration::from_millis(600);
/// Between two looks at that.
const LOOK: Duration = Duration::from_millis(1);

impl Engine {
    /// Everything pending fails with `error`, which becomes the group's first cause (L32); then the peers are told.
    pub(crate) fn fail(mut self, error: Error) {
        let place = self.shared.place;
        let (messages, collectives, first) = {
            let mut queue = self.shared.lock();
            let first = queue.first_error.get_or_insert_with(|| error.clone()).clone();
            (
                std::mem::take(&mut queue.messages),
                std::mem::take(&mut queue.collectives),
                first,
            )
        };
        let error = if first.kind() == ErrorKind::Aborted {
            first
        } else {
            error
        };
        tracing::debug!(rank = place.rank, epoch = %place.epoch, %error, "the group failed");
        let about = error.context().peer.unwrap_or(u32::MAX);
        let current = self
            .executor
            .as_ref()
            .and_then(|executor| executor.current.as_ref());
        let text = current
            .map_or_else(|| error.clone(), |execution| execution.context(error.clone()))
            .to_string();
        // The peers first: once its own work has failed, this process may end.
        let (origin, about, text) = match self.reported {
            // Passed on as it came: the origin may not have reached all ranks before it closed.
            Some((origin, about)) => (origin, about, error.message().to_string()),
            None if error.kind() == ErrorKind::Aborted => (place.rank, about, error.message().to_string()),
            None => (place.rank, about, text),
        };
        self.tell(
            ControlKind::Abort,
            wire::code_of(error.kind()),
            about,
            origin,
            &text,
        );
        self.speak();
        // A caller may still be in the executor or in the channels; what it works on is its own until it has given it back.
        let (executor, channels) = self.shared.recall((self.executor.take(), self.channels.take()));
        if let Some(mut executor) = executor {
            for execution in executor
                .current
                .take()
                .into_iter()
                .chain(executor.ahead.drain(..))
            {
                execution.fail(error.clone());
            }
        }
        for submission in collectives.into_iter().chain(messages) {
            let mut error = error
                .clone()
                .with_op(submission.op.kind().name())
                .with_rank(place.rank)
                .with_epoch(place.epoch);
            if let Some(seq) = submission.seq {
                error = error.with_seq(seq);
            }
            if let Some(dtype) = submission.op.dtype() {
                error = error.with_data(dtype, submission.op.count());
            }
            submission.completer.fail(error, submission.op.into_tensors());
        }
        if let Some(mut channels) = channels {
            channels.messages.fail_all(&error);
            channels.forget();
        }
        self.failure_notices();
    }

    pub(crate) fn tell(&mut self, kind: ControlKind, code: u8, about: u32, origin: u32, text: &str) {
        let text = wire::cut(text).as_bytes().to_vec();
        let header = Control {
            kind,
            code,
            epoch: self.shared.place.epoch,
            id: 0,
            a: about,
            b: origin,
            length: text.len() as u64,
        };
        for peer in self.peers.iter_mut().flatten() {
            peer.control.push(header, text.clone());
        }
    }

    /// Writes of what is queued on the control connections as much as goes at once.
    pub(crate) fn speak(&mut self) {
        let peers = self.peers.iter_mut().flatten();
        for connection in peers.filter_map(|peer| peer.control.connection_mut()) {
            connection.link.writable = true;
            connection.flush();
        }
    }

    /// Writes what is queued on the control connections, for a short time; then the sockets close.
    pub(crate) fn failure_notices(&mut self) {
        let until = deadline_in(NOTICE_TIME);
        loop {
            self.speak();
            let mut fds = Vec::new();
            let peers = self.peers.iter().flatten();
            for connection in peers.filter_map(|peer| peer.control.connection()) {
                if connection.wants_write() {
                    fds.push(PollFd::from_borrowed_fd(connection.link.as_fd(), PollFlags::OUT));
                }
            }
            let left = time_left(until);
            if fds.is_empty() || left.is_zero() {
                break;
            }
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            if poll(&mut fds, Some(&timeout)).is_err() {
                break;
            }
        }
        // A socket that is closed with something unread breaks instead of ending, and may take the words with it.
        let mut rest = [0; 4096];
        let peers = self.peers.iter_mut().flatten();
        for connection in peers.filter_map(|peer| peer.control.connection_mut()) {
            let link = &mut connection.link;
            for _ in 0..UNREAD {
                if !matches!(link.read(&mut rest), Moved::Bytes(_)) {
                    break;
                }
            }
        }
    }

    /// Waits until the others have what this rank has sent them last: they may need it, and a peer that runs ahead would break the connections
    /// if they were closed before. For as long as they take any of it, within the deadline of a shutdown.
    pub(crate) fn part(&self, (executor, channels): Drivable) {
        let most = match self.shared.lock().stop {
            Some(Stop::Drain(deadline)) => deadline.max(deadline_in(NOTICE_TIME)),
            _ => deadline_in(LEAVING),
        };
        let ports = executor.into_iter().flat_map(|executor| executor.ports);
        let data = ports.flatten().flat_map(Port::into_links);
        let messages = channels.into_iter().flat_map(|channels| channels.into_links());
        let mut links: Vec<Link> = data.chain(messages).collect();
        let (mut before, mut until) = (0, most);
        loop {
            let mut left = 0;
            // The others close at once: a rank may wait for that.
            links.retain_mut(|link| {
                let bytes = link.at_risk();
                left += bytes;
                bytes > 0
            });
            if left != before {
                (before, until) = (left, most.min(deadline_in(NOTICE_TIME)));
            }
            if links.is_empty() || time_left(until).is_zero() {
                return;
            }
            // Nothing tells when the last byte has arrived.
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::Arc;

    use ftcore::{
        Configuration, DType, Device, Epoch, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
        Staged, Status, Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor,
    };

    use super::*;
    use crate::GlooGroup;
    use crate::queue::Taken;

    /// What a process of its own does before it ends, and where the store is.
    const SCENE: &str = "OXCCL_TEST_LEAVE";
    const STORE: &str = "OXCCL_TEST_LEAVE_STORE";
    const SOON: Duration = Duration::from_secs(20);

    fn configuration(store: Arc<dyn Store>, rank: u32) -> Configuration {
        Configuration {
            store,
            prefix: "leave".into(),
            name: "leave".into(),
            epoch: Epoch(1),
            rank,
            world_size: 2,
            deadline: deadline_in(SOON),
            cancel: Default::default(),
        }
    }

    fn connected(address: &str, rank: u32) -> GlooGroup {
        let store = TcpStore::connect(address, deadline_in(SOON)).unwrap();
        let group = GlooGroup::new("leave", GroupOptions::default()).unwrap();
        group.configure(configuration(Arc::new(store), rank)).unwrap();
        group
    }

    /// Ends a group, and this process at once.
    fn play(scene: &str) -> ! {
        let group = connected(&std::env::var(STORE).unwrap(), 0);
        match scene {
            "dropped" => drop(group),
            "staged" => drop(Staged::new(Arc::new(group), &Device::CPU, SOON).unwrap()),
            _ => {
                std::thread::scope(|scope| {
                    scope.spawn(|| group.abort("it ends"));
                });
                // The thread that ends the process does not own the group.
                std::mem::forget(group);
            }
        }
        std::process::exit(0)
    }

    #[test]
    fn a_process_that_ends_right_after_it_has_ended_a_group_leaves_nothing_unsaid() {
        if let Ok(scene) = std::env::var(SCENE) {
            play(&scene);
        }
        let scenes = [("dropped", "left"), ("staged", "left"), ("aborted", "it ends")];
        for (scene, said) in scenes.iter().cycle().take(30) {
            let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
            let address = server.local_addr().to_string();
            let mut quitter = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "leave::tests::a_process_that_ends_right_after_it_has_ended_a_group_leaves_nothing_unsaid"])
                .env(SCENE, scene)
                .env(STORE, &address)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let group = connected(&address, 1);
            let error = match group.recv(Tensor::zeros(DType::U8, 1), 0, 0) {
                Ok(receive) => receive.wait(deadline_in(SOON)).unwrap_err(),
                // The notices may be faster than the call.
                Err(rejected) => {
                    assert_eq!(rejected.error.kind(), ErrorKind::Poisoned, "{scene}: {rejected}");
                    group.error().unwrap()
                }
            };
            assert!(error.to_string().contains(said), "{scene}: {error}");
            assert!(quitter.wait().unwrap().success(), "{scene}");
        }
    }

    #[test]
    fn what_a_rank_has_sent_last_arrives_although_it_leaves_and_others_run_ahead_of_it() {
        const LARGE: usize = 512 << 10;
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let over_tcp = |rank| {
            let mut options = GroupOptions::default();
            options.hints.insert("transport".into(), "tcp".into());
            let group = GlooGroup::new("leave", options).unwrap();
            group.configure(configuration(store.clone(), rank)).unwrap();
            group
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| over_tcp(1));
            let group = over_tcp(0);
            let other = other.join().unwrap();
            let (shared, _) = group.ready(&SubmitOptions::by(deadline_in(SOON))).unwrap();
            // This thread drives the collectives of rank 0, and takes its time.
            let mut executor = shared.lock().executor.take().unwrap();
            let before = group.traffic().sent;
            let first = group.broadcast(Tensor::zeros(DType::U8, LARGE), 1).unwrap();
            let second = group.broadcast(Tensor::zeros(DType::U8, LARGE), 0).unwrap();
            while group.traffic().sent - before < 64 << 10 {
                executor.turn(&shared, Some(u64::MAX)).unwrap();
            }
            // Done with it as soon as its kernel has all.
            let its = other.broadcast(Tensor::from_vec(vec![7u8; LARGE]), 1).unwrap();
            its.wait(deadline_in(SOON)).unwrap();
            let leaves = scope.spawn(move || other.shutdown(deadline_in(SOON)));
            let until = deadline_in(SOON);
            while shared.fate(1).is_none() {
                assert!(!time_left(until).is_zero(), "rank 1 does not leave");
                std::thread::yield_now();
            }
            while matches!(first.status(), Status::Pending) {
                assert!(!time_left(until).is_zero(), "nothing more comes");
                executor.try_sockets();
                executor.turn(&shared, Some(u64::MAX)).unwrap();
            }
            assert!(first.take_tensor().unwrap().bytes().iter().all(|b| *b == 7));
            leaves.join().unwrap().unwrap();
            shared.give_back(executor, Taken::Caller);
            let error = second.wait(until).unwrap_err();
            assert!(error.to_string().contains("left"), "{error}");
        });
    }
}
