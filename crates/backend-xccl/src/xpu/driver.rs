//! Which devices there are.

use std::sync::OnceLock;

use ftcore::{Error, Result};

use crate::raw::sycl::{count_of_gpus, sycl};

/// Names the devices that count, as SYCL's filters, separated by commas.
pub(crate) const ENV_DEVICES: &str = "OXCCL_XPU_DEVICES";

/// A filter for each device, in the order of their indices. Decided once per process.
pub(crate) fn selectors() -> Result<&'static [String]> {
    static CHOSEN: OnceLock<Result<Vec<String>>> = OnceLock::new();
    CHOSEN
        .get_or_init(|| {
            sycl()?;
            match std::env::var(ENV_DEVICES) {
                Ok(list) if !list.trim().is_empty() => parse(&list),
                _ => Ok((0..count_of_gpus()?)
                    .map(|i| format!("level_zero:gpu:{i}"))
                    .collect()),
            }
        })
        .as_ref()
        .map(Vec::as_slice)
        .map_err(Clone::clone)
}

fn parse(list: &str) -> Result<Vec<String>> {
    list.split(',')
        .map(|part| match part.trim() {
            "" => Err(Error::invalid(format!(
                "{ENV_DEVICES}='{list}' has an empty part; it is a list such as level_zero:gpu:0,level_zero:gpu:1"
            ))),
            filter => Ok(filter.to_ascii_lowercase()),
        })
        .collect()
}

/// The device of a replica group when several share a host: they take turns. `None` without devices.
///
/// There is no variable that hides XPUs from a process as CUDA's does, so every process sees all of them and must choose.
pub(crate) fn turn(replica: u32, devices: u32) -> Option<u32> {
    replica.checked_rem(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_take_turns_at_the_devices() {
        let picked: Vec<_> = (0..5).map(|replica| turn(replica, 3)).collect();
        assert_eq!(picked, [Some(0), Some(1), Some(2), Some(0), Some(1)]);
        assert_eq!(turn(4, 0), None);
    }

    #[test]
    fn the_list_of_devices_is_read_strictly() {
        assert_eq!(
            parse("cpu, Level_Zero:gpu:1").unwrap(),
            ["cpu", "level_zero:gpu:1"]
        );
        assert!(parse("cpu,,gpu").unwrap_err().to_string().contains("empty part"));
    }
}
