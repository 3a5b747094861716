//! Who calls over which connections, and whose have all ended: of a replica without a stream, as torchft's are, that is the evidence of its death.
//!
//! A client that connects anew after an error, or has several connections, is not dead: its connections must all have been ended from its side, and none
//! may come within [`GRACE`]. A killed process's kernel closes them all at once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Weak;
use std::time::{Duration, Instant};

use crate::serve::Line;

/// How long a replica may be without a connection. torchft's managers send a heartbeat ten times a second, and connect anew for it.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// The connections by replica id, and the reverse.
#[derive(Default)]
pub(super) struct Callers {
    lines: HashMap<String, BTreeMap<u64, Weak<Line>>>,
    ids: HashMap<u64, Vec<String>>,
    /// Ids without a connection, and when their grace is over.
    without: BTreeMap<String, Instant>,
    /// By id, the connections that are being read to the end.
    read: HashMap<String, BTreeSet<u64>>,
}

impl Callers {
    /// `id` calls over the connection with the number `line`.
    pub(super) fn call(&mut self, line: u64, connection: Weak<Line>, id: String) {
        self.without.remove(&id);
        self.lines.entry(id.clone()).or_default().insert(line, connection);
        self.ids.entry(line).or_default().push(id);
    }

    /// The connection has ended, `by_peer` or because the lighthouse closed it, which is evidence of nothing. Gives the ids that have none left.
    pub(super) fn ended(&mut self, line: u64, by_peer: bool, now: Instant) -> Vec<String> {
        let mut none_left = Vec::new();
        for id in self.ids.remove(&line).unwrap_or_default() {
            let Some(lines) = self.lines.get_mut(&id) else {
                continue;
            };
            lines.remove(&line);
            if lines.is_empty() {
                self.lines.remove(&id);
                none_left.push(id.clone());
                if by_peer {
                    self.without.insert(id, now + GRACE);
                }
            }
        }
        none_left
    }

    /// Has all connections of `id` read to the end. False if there is none.
    pub(super) fn read(&mut self, id: &str) -> bool {
        let mut asked = BTreeSet::new();
        for (line, connection) in self.lines.get(id).into_iter().flatten() {
            if let Some(connection) = connection.upgrade() {
                connection.read();
                asked.insert(*line);
            }
        }
        let any = !asked.is_empty();
        if any {
            self.read.insert(id.to_string(), asked);
        }
        any
    }

    /// This connection is read, or has ended. Gives the ids of which that was the last one.
    pub(super) fn is_read(&mut self, line: u64) -> Vec<String> {
        let mut whole = Vec::new();
        self.read.retain(|id, asked| {
            let last = asked.remove(&line) && asked.is_empty();
            if last {
                whole.push(id.clone());
            }
            !last
        });
        whole
    }

    /// Those whose grace is over and who have not connected again.
    pub(super) fn gone(&mut self, now: Instant) -> Vec<String> {
        let mut over = Vec::new();
        self.without.retain(|id, until| {
            let is_over = *until <= now;
            if is_over {
                over.push(id.clone());
            }
            !is_over
        });
        over
    }

    /// What has ended until now is no evidence.
    pub(super) fn forgive(&mut self) {
        self.without.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_gone_once_all_its_connections_have_ended_and_none_came_within_the_grace() {
        let (mut callers, start) = (Callers::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let mut call = |line, id: &str| callers.call(line, Weak::new(), id.into());
        call(1, "a");
        call(2, "a");
        call(3, "b");
        callers.ended(1, true, at(0));
        assert_eq!(callers.gone(at(10_000)), [""; 0], "a has another");
        callers.ended(2, true, at(10_000));
        callers.ended(3, true, at(10_100));
        assert_eq!(callers.gone(at(10_400)), [""; 0]);
        // b comes back in time.
        callers.call(4, Weak::new(), "b".into());
        assert_eq!(callers.gone(at(10_550)), ["a"]);
        assert_eq!(callers.gone(at(20_000)), [""; 0]);
        // What the lighthouse closed itself says nothing, nor does what it did not see because it was away.
        callers.ended(4, false, at(20_000));
        callers.call(5, Weak::new(), "c".into());
        callers.ended(5, true, at(20_000));
        callers.forgive();
        assert_eq!(callers.gone(at(30_000)), [""; 0]);
        assert!(callers.lines.is_empty() && callers.ids.is_empty() && callers.without.is_empty());
    }

    #[test]
    fn what_ended_before_a_replica_connected_again_says_nothing_of_its_new_connection() {
        let (mut callers, start) = (Callers::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        callers.call(1, Weak::new(), "a".into());
        callers.ended(1, true, at(0));
        callers.call(2, Weak::new(), "a".into());
        // The lighthouse closed that one itself.
        callers.ended(2, false, at(400));
        assert_eq!(callers.gone(at(520)), [""; 0]);
        // And the grace begins anew.
        callers.call(3, Weak::new(), "a".into());
        callers.ended(3, true, at(600));
        callers.call(4, Weak::new(), "a".into());
        callers.ended(4, true, at(1000));
        assert_eq!(callers.gone(at(1150)), [""; 0]);
        assert_eq!(callers.gone(at(1500)), ["a"]);
    }
}
