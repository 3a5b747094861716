//! Whether two processes can mean the same process by a number.

/// Names the processes that a process number means something to: this boot of this machine, and the namespace. `None` if the system does not
/// tell.
pub fn process_space() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let space = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{}+{}", boot.trim(), space.display()))
}
