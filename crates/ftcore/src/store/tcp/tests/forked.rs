//! What a process that was forked off does with the store of its parent: both have the same sockets.

use super::*;
use crate::forked::Born;

#[test]
fn the_end_of_a_forked_child_leaves_its_parent_s_server_alone() {
    let mut server = server();
    let store = client(&server);
    server.born = Born::in_parent();
    let address = server.local_addr().to_string();
    server.shutdown();
    drop(server);
    // Those that were connected are served, and so are those that come.
    store.set("k", b"v", soon()).unwrap();
    let other = TcpStore::connect(&address, soon()).unwrap();
    assert_eq!(other.get("k", soon()).unwrap(), b"v");
}

#[test]
fn a_forked_child_calls_over_connections_of_its_own() {
    let server = server();
    let store = client(&server);
    store.set("k", b"v", soon()).unwrap();
    assert_eq!(server.opened(), 1);
    store.fork();
    assert_eq!(store.get("k", soon()).unwrap(), b"v");
    assert_eq!(server.opened(), 2);
    // That is kept for later calls.
    store.set("k", b"w", soon()).unwrap();
    assert_eq!(server.opened(), 2);
}
