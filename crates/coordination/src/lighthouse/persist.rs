//! The state file: the last quorum's id and members, replaced as a whole by a rename.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use ftcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use protocol::Quorum;

/// No state file of ours is larger, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What outlives a restart.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) quorum_id: i64,
    pub(crate) members: Vec<String>,
}

/// Reads the file; a missing one is the default. Errors: `Io`, or `Corrupt` if it is not ours.
pub(crate) fn load(path: &Path) -> Result<Saved> {
    let what = || format!("state file {}", path.display());
    let file = match File::open(path) {
        Ok(f) => f,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Saved::default()),
        Err(e) => return Err(Error::io(what(), e)),
    };
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut text)
        .map_err(|e| Error::io(what(), e))?;
    let saved: Saved = serde_json::from_slice(&text)
        .map_err(|e| Error::new(ErrorKind::Corrupt, format!("{}: {e}", what())).with_source(e))?;
    if saved.quorum_id < 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!("{}: quorum_id {} is negative", what(), saved.quorum_id),
        ));
    }
    Ok(saved)
}

/// Replaces the file, so that a crash leaves the old or the new one.
pub(crate) fn save(path: &Path, quorum: &Quorum) -> Result<()> {
    let saved = Saved {
        quorum_id: quorum.quorum_id,
        members: quorum.ids().map(str::to_string).collect(),
    };
    let what = || format!("state file {}", path.display());
    let text = serde_json::to_vec(&saved)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("{}: {e}", what())).with_source(e))?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let write = || {
        let mut file = File::create(&name)?;
        file.write_all(&text)?;
        file.sync_data()?;
        std::fs::rename(&name, path)
    };
    write().map_err(|e| Error::io(what(), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Member;

    #[test]
    fn what_is_saved_is_loaded_and_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        assert_eq!(load(&path).unwrap(), Saved::default());
        let participants = vec![Member {
            replica_id: "a:1".into(),
            ..Member::default()
        }];
        save(
            &path,
            &Quorum {
                quorum_id: 41,
                participants,
            },
        )
        .unwrap();
        assert_eq!(
            load(&path).unwrap(),
            Saved {
                quorum_id: 41,
                members: vec!["a:1".into()]
            }
        );
        std::fs::write(&path, b"{\"quorum_id\": 4").unwrap();
        assert_eq!(load(&path).unwrap_err().kind(), ErrorKind::Corrupt);
        std::fs::write(&path, b"{\"quorum_id\": -4, \"members\": []}").unwrap();
        assert_eq!(load(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
