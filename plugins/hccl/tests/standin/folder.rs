//! Where the stand-in is: cargo builds its dylib as a dependency of these tests, beside them.

use std::path::PathBuf;

/// The stand-in's dylib.
pub(crate) fn library() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let library = program.with_file_name("libhccl.so");
    assert!(
        library.exists(),
        "{} is not there: cargo builds it with these tests",
        library.display()
    );
    library
}

/// A folder as the vendor's: both libraries under their names. Both are the stand-in.
pub(crate) fn standin() -> PathBuf {
    with_links("standin", &["libhccl.so", "libSynapse.so"])
}

/// A folder of these tests in which the stand-in has these names.
pub(crate) fn with_links(folder: &str, names: &[&str]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(folder);
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    for name in names {
        let link = folder.join(name);
        if std::fs::read_link(&link).ok().as_ref() != Some(&library()) {
            // Another test program may do the same at the same moment: a new name, then an atomic rename.
            let fresh = folder.join(format!("{name}.{}", std::process::id()));
            let _ = std::fs::remove_file(&fresh);
            std::os::unix::fs::symlink(library(), &fresh).expect("a link can be made");
            std::fs::rename(&fresh, &link).expect("a link can be renamed");
        }
    }
    folder
}
