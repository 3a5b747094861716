//! Which snapshots are on offer, and to whom.
//!
//! `published` is open to every reader. A retired snapshot that still has readers moves to `lingering`: its chunks are
//! served on, its manifest is not, and it goes when its last reader disconnects or two newer ones linger. A reader is a
//! connection that holds a [`Pin`]; pins do not own the snapshot, so a reader that never ends cannot keep
//! memory that the table has given up.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use ftcore::{Epoch, Step};
use tokio::sync::watch;

use crate::{Snapshot, SnapshotId};

const MAX_PUBLISHED: usize = 2;
const MAX_LINGERING: usize = 2;

#[derive(Debug)]
struct Entry {
    snapshot: Arc<Snapshot>,
    /// One reference here, one in every pin.
    readers: Arc<()>,
}

impl Entry {
    fn has_readers(&self) -> bool {
        Arc::strong_count(&self.readers) > 1
    }

    fn is(&self, step: Step, digest: Option<Hash>) -> bool {
        self.snapshot.step() == step && digest.is_none_or(|d| self.snapshot.known_digest() == Some(d))
    }
}

#[derive(Debug, Default)]
struct Table {
    /// Oldest publication first.
    published: VecDeque<Entry>,
    lingering: VecDeque<Entry>,
    /// The step published last, even if it was retired since.
    last_step: Option<Step>,
    closed: bool,
}

impl Table {
    fn linger(&mut self, entry: Entry, freed: &mut Vec<Entry>) {
        self.lingering.push_back(entry);
        self.sweep(freed);
    }

    fn sweep(&mut self, freed: &mut Vec<Entry>) {
        let (keep, gone) = std::mem::take(&mut self.lingering)
            .into_iter()
            .partition(Entry::has_readers);
        self.lingering = keep;
        freed.extend::<VecDeque<_>>(gone);
        while self.lingering.len() > MAX_LINGERING {
            freed.extend(self.lingering.pop_front());
        }
    }
}

/// The mark of a reader: while it lives, the snapshot may linger.
#[derive(Debug)]
pub(super) struct Pin(#[allow(dead_code)] Arc<()>);

/// What a request for a step gets.
#[derive(Debug)]
pub(super) enum Lookup {
    Found(Arc<Snapshot>, Pin),
    /// Not published yet; the text is for the case that the wait ends first.
    NotYet(String),
    /// Will not come.
    Other(String),
    Closed,
}

/// What part of a snapshot is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Manifest,
    /// Chunks by index; with the digest of their manifest, if the reader says which.
    Chunks(Vec<usize>, Option<Hash>),
}

impl Part {
    /// `None` for the manifest; else the digest, if there is one.
    pub(super) fn digest(&self) -> Option<Option<Hash>> {
        match self {
            Self::Manifest => None,
            Self::Chunks(_, digest) => Some(*digest),
        }
    }
}

/// Which snapshot is asked for; what is `None` does not matter to the reader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) step: Step,
    pub(super) epoch: Option<Epoch>,
    pub(super) lineage: Option<String>,
}

impl Asked {
    fn fits(&self, id: &SnapshotId) -> bool {
        self.step == id.step
            && self.epoch.is_none_or(|e| e == id.epoch)
            && self.lineage.as_ref().is_none_or(|l| *l == id.lineage)
    }

    /// The difference to what is served, in terms that the reader asked in.
    fn instead_of(&self, served: Option<&SnapshotId>) -> String {
        let say = |step: Step, epoch: Option<Epoch>, lineage: Option<&str>| {
            let epoch = epoch.map_or(String::new(), |e| format!(" of epoch {e}"));
            let lineage = lineage.map_or(String::new(), |l| format!(" with lineage '{l}'"));
            format!("{step}{epoch}{lineage}")
        };
        let asked = say(self.step, self.epoch, self.lineage.as_deref());
        match served {
            Some(id) => {
                let lineage = self.lineage.is_some().then_some(id.lineage.as_str());
                let served = say(id.step, self.epoch.map(|_| id.epoch), lineage);
                format!("serving step {served}, asked for {asked}")
            }
            None => format!("serving no step, asked for {asked}"),
        }
    }
}

/// The table with its lock, and the signal that it changed.
#[derive(Debug)]
pub(super) struct Serving {
    table: Mutex<Table>,
    changed: watch::Sender<u64>,
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            changed: watch::channel(0).0,
        }
    }
}

impl Serving {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change of the table is complete before anything that could panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table, frees what fell out of it after the lock is released, and wakes those who wait.
    fn change<T>(&self, f: impl FnOnce(&mut Table, &mut Vec<Entry>) -> T) -> T {
        let mut freed = Vec::new();
        let result = f(&mut self.table(), &mut freed);
        drop(freed);
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
        result
    }

    /// False if the server was closed.
    pub(super) fn publish(&self, snapshot: Arc<Snapshot>) -> bool {
        self.change(|table, freed| {
            if table.closed {
                return false;
            }
            table.last_step = Some(snapshot.step());
            if let Some(newest) = table.published.back().or(table.lingering.back()) {
                snapshot.comes_after(&newest.snapshot);
            }
            if let Some(at) = table
                .published
                .iter()
                .position(|e| e.snapshot.step() == snapshot.step())
                && let Some(old) = table.published.remove(at)
            {
                if Arc::ptr_eq(&old.snapshot, &snapshot) {
                    table.published.push_back(old);
                    return true;
                }
                table.linger(old, freed);
            }
            table.published.push_back(Entry {
                snapshot,
                readers: Arc::new(()),
            });
            while table.published.len() > MAX_PUBLISHED {
                if let Some(old) = table.published.pop_front() {
                    table.linger(old, freed);
                }
            }
            true
        })
    }

    pub(super) fn retire(&self) {
        self.change(|table, freed| {
            for old in std::mem::take(&mut table.published) {
                table.linger(old, freed);
            }
        });
    }

    /// No more readers at all; those in the middle of a snapshot are served on until the server stops.
    pub(super) fn close(&self) {
        self.change(|table, freed| {
            table.closed = true;
            for old in std::mem::take(&mut table.published) {
                table.linger(old, freed);
            }
        });
    }

    pub(super) fn published_steps(&self) -> Vec<Step> {
        self.table().published.iter().map(|e| e.snapshot.step()).collect()
    }

    /// A signal for every change from now on.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Frees lingering snapshots whose readers are gone; called when a connection ends.
    pub(super) fn sweep(&self) {
        let mut freed = Vec::new();
        self.table().sweep(&mut freed);
    }

    /// `chunks`: `None` for a manifest; else the digest that the reader names, if it does.
    pub(super) fn lookup(&self, asked: &Asked, chunks: Option<Option<Hash>>) -> Lookup {
        let table = self.table();
        let found = match chunks {
            None => table.published.iter().rev().find(|e| asked.fits(e.snapshot.id())),
            Some(digest) => {
                let all = table.published.iter().rev().chain(table.lingering.iter().rev());
                all.into_iter()
                    .find(|e| asked.fits(e.snapshot.id()) && e.is(asked.step, digest))
            }
        };
        if let Some(entry) = found {
            return Lookup::Found(Arc::clone(&entry.snapshot), Pin(Arc::clone(&entry.readers)));
        }
        if table.closed {
            return Lookup::Closed;
        }
        let newest = table.published.back().map(|e| e.snapshot.id());
        let text = asked.instead_of(newest);
        let may_come = match (newest, table.last_step, chunks) {
            // The reader names a snapshot that it has seen: it was replaced or retired, and will not come back.
            (_, _, Some(Some(_))) => false,
            // The same step again, after a commit that failed: epochs only grow.
            (Some(newest), ..) if asked.step == newest.step => asked.epoch.is_some_and(|e| e > newest.epoch),
            (Some(newest), ..) => asked.step > newest.step,
            // A step whose commit failed is published again in the next epoch.
            (None, Some(last), _) => asked.step >= last,
            (None, None, _) => true,
        };
        if may_come {
            Lookup::NotYet(text)
        } else {
            Lookup::Other(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;

    fn snapshot(step: i64) -> Arc<Snapshot> {
        Snapshot::new(Step(step), Epoch(1), &StateDict::new()).unwrap()
    }

    fn of(step: i64) -> Asked {
        Asked {
            step: Step(step),
            ..Asked::default()
        }
    }

    fn pin(s: &Serving, step: i64) -> Pin {
        match s.lookup(&of(step), None) {
            Lookup::Found(_, pin) => pin,
            other => panic!("step {step}: {other:?}"),
        }
    }

    fn text(s: &Serving, step: i64) -> String {
        match s.lookup(&of(step), None) {
            Lookup::NotYet(t) => format!("wait: {t}"),
            Lookup::Other(t) => t,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn the_newest_two_are_offered_older_ones_refused_and_newer_ones_awaited() {
        let s = Serving::default();
        assert_eq!(text(&s, 0), "wait: serving no step, asked for 0");
        for step in [3, 4, 5] {
            assert!(s.publish(snapshot(step)));
        }
        assert_eq!(s.published_steps(), [4, 5].map(Step));
        assert_eq!(text(&s, 3), "serving step 5, asked for 3");
        assert_eq!(text(&s, 6), "wait: serving step 5, asked for 6");
        s.retire();
        assert_eq!(text(&s, 4), "serving no step, asked for 4");
        assert_eq!(text(&s, 5), "wait: serving no step, asked for 5");
    }

    #[test]
    fn l29_unread_snapshots_are_freed_at_once_and_readers_keep_at_most_two_retired_ones() {
        let s = Serving::default();
        let alive = |w: &std::sync::Weak<Snapshot>| w.strong_count() > 0;
        let mut weak = Vec::new();
        let mut pins = Vec::new();
        for step in 0..6 {
            let snap = snapshot(step);
            weak.push(Arc::downgrade(&snap));
            s.publish(snap);
            if step < 5 {
                pins.push(pin(&s, step));
            }
            s.retire();
        }
        // Step 5 had no reader; 0 to 2 have readers that never end, but newer ones linger.
        assert_eq!(
            weak.iter().map(alive).collect::<Vec<_>>(),
            [false, false, false, true, true, false]
        );
        assert!(matches!(s.lookup(&of(4), Some(None)), Lookup::Found(..)));
        assert!(!matches!(s.lookup(&of(4), None), Lookup::Found(..)));
        pins.clear();
        s.sweep();
        assert!(weak.iter().all(|w| !alive(w)));
    }

    #[test]
    fn a_step_published_anew_is_not_mixed_up_with_the_old_one() {
        let s = Serving::default();
        let old = snapshot(7);
        let digest = old.manifest().digest();
        s.publish(Arc::clone(&old));
        let reader = pin(&s, 7);
        let new = Snapshot::new(Step(7), Epoch(2), &StateDict::new()).unwrap();
        s.publish(Arc::clone(&new));
        assert_eq!(s.published_steps(), [7].map(Step));
        let Lookup::Found(found, _) = s.lookup(&of(7), Some(Some(digest))) else {
            panic!("old is gone")
        };
        assert!(Arc::ptr_eq(&found, &old));
        let Lookup::Found(found, _) = s.lookup(&of(7), None) else {
            panic!("new is not there")
        };
        assert!(Arc::ptr_eq(&found, &new));
        drop(reader);
        s.sweep();
        assert!(matches!(s.lookup(&of(7), Some(Some(digest))), Lookup::Other(_)));
    }

    #[test]
    fn a_closed_table_takes_nothing_more() {
        let s = Serving::default();
        s.publish(snapshot(1));
        s.close();
        assert!(!s.publish(snapshot(2)));
        assert!(matches!(s.lookup(&of(1), None), Lookup::Closed));
    }

    #[test]
    fn a_snapshot_of_an_earlier_epoch_is_waited_out_and_one_of_another_history_refused() {
        let s = Serving::default();
        let id = |epoch, lineage: &str| SnapshotId {
            step: Step(7),
            epoch,
            lineage: lineage.into(),
        };
        let publish = |id| s.publish(Snapshot::of(id, StateDict::new(), 64).unwrap());
        let ask = |epoch, lineage: &str| {
            let asked = Asked {
                step: Step(7),
                epoch: Some(epoch),
                lineage: Some(lineage.into()),
            };
            match s.lookup(&asked, None) {
                Lookup::NotYet(t) => format!("wait: {t}"),
                Lookup::Other(t) => t,
                Lookup::Found(found, _) => found.id().to_string(),
                Lookup::Closed => "closed".into(),
            }
        };
        publish(id(Epoch(3), "a"));
        let said = "serving step 7 of epoch 3 with lineage 'a', asked for 7 of epoch";
        assert_eq!(ask(Epoch(4), "a"), format!("wait: {said} 4 with lineage 'a'"));
        assert_eq!(ask(Epoch(2), "a"), format!("{said} 2 with lineage 'a'"));
        assert_eq!(ask(Epoch(3), "b"), format!("{said} 3 with lineage 'b'"));
        publish(id(Epoch(4), "a"));
        assert_eq!(ask(Epoch(4), "a"), "step 7 of epoch 4 with lineage a");
    }
}
