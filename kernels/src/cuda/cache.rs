//! Compiled kernels kept on disk: compiling takes seconds, and a program needs the same kernels in every run.
//!
//! An entry is named by a digest of all that decides the code: NVRTC's version, the options, the source text and the
//! kernels' names. What is loaded from here runs on the GPU, so only a directory that nobody else can write to is used. A
//! cache that cannot be used is no error; kernels are then compiled.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs, io};

use sha2::{Digest as _, Sha256};

/// The environment variable that names the cache's directory; empty, it turns the cache off. Without it, `ithaca` in
/// `XDG_CACHE_HOME` or in `.cache` of the home directory.
const CACHE_VARIABLE: &str = "ITHACA_CACHE_DIR";

/// The most entries; those longest unchanged go first. An entry has up to some MiB.
const CAPACITY: usize = 64;

/// The form of entries: a file of another form is not read.
const FORM: &[u8] = b"ithaca-kernels-1";

/// Compiled kernels of one architecture.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// A module for the driver.
    pub cubin: Vec<u8>,
    /// The name of each kernel in the module.
    pub names: BTreeMap<String, CString>,
}

/// The directory of the cache.
#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
}

/// The file name of an entry: a digest of the parts, each with its length.
pub(super) fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    hexadecimal(&digest.finalize())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

impl Cache {
    /// The cache that the environment names, where it can be used.
    pub(super) fn from_environment() -> Option<Self> {
        let base = match env::var_os(CACHE_VARIABLE) {
            Some(named) if named.is_empty() => return None,
            Some(named) => PathBuf::from(named),
            None => {
                let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cache"));
                let caches = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
                caches.or_else(home)?.join("ithaca")
            }
        };
        Self::open(&base.join("kernels"))
    }

    /// A directory, made where it is missing; none where somebody else may write to it.
    pub(super) fn open(directory: &Path) -> Option<Self> {
        make_private(directory).ok()?;
        is_private(directory).then(|| Self { directory: directory.to_owned() })
    }

    /// An entry, if there is one and it is whole.
    pub(super) fn read(&self, key: &str) -> Option<Compiled> {
        decode(&fs::read(self.directory.join(key)).ok()?)
    }

    /// Keeps an entry. Other processes see all of it or nothing.
    pub(super) fn write(&self, key: &str, compiled: &Compiled) {
        // A full disk or a directory that went away costs only the time of the next compilation.
        let _ = self.try_write(key, compiled);
    }

    fn try_write(&self, key: &str, compiled: &Compiled) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        io::Write::write_all(&mut file, &encode(compiled))?;
        file.persist(self.directory.join(key))?;
        let mut entries: Vec<(SystemTime, PathBuf)> = fs::read_dir(&self.directory)?
            .flatten()
            // Files of other names are not this cache's.
            .filter(|entry| entry.file_name().len() == key.len())
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        entries.sort();
        for (_, path) in entries.iter().take(entries.len().saturating_sub(CAPACITY)) {
            fs::remove_file(path)?;
        }
        Ok(())
    }
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let names: BTreeMap<&str, &[u8]> =
        compiled.names.iter().map(|(name, lowered)| (name.as_str(), lowered.to_bytes())).collect();
    let content = postcard::to_allocvec(&(names, &compiled.cubin)).expect("names and bytes have a form");
    [FORM, &Sha256::digest(&content), &content].concat()
}

fn decode(bytes: &[u8]) -> Option<Compiled> {
    let (digest, content) = bytes.strip_prefix(FORM)?.split_at_checked(32)?;
    if Sha256::digest(content).as_slice() != digest {
        return None;
    }
    let (names, cubin): (BTreeMap<String, Vec<u8>>, Vec<u8>) = postcard::from_bytes(content).ok()?;
    let names = names.into_iter().map(|(name, lowered)| Some((name, CString::new(lowered).ok()?)));
    Some(Compiled { cubin, names: names.collect::<Option<_>>()? })
}

#[cfg(unix)]
fn make_private(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

#[cfg(unix)]
fn is_private(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(found) = fs::symlink_metadata(directory) else { return false };
    // A file that this process makes has the owner that the directory must have.
    let Ok(own) = tempfile::tempfile_in(directory).and_then(|file| file.metadata()) else { return false };
    found.is_dir() && found.uid() == own.uid() && found.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn make_private(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)
}

/// Permissions of other systems are not read here; the cache is not used there.
#[cfg(not(unix))]
fn is_private(_directory: &Path) -> bool {
    false
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn compiled(byte: u8) -> Compiled {
        let names = [("softmax<float>".to_owned(), CString::new("_Z7softmax").unwrap())];
        Compiled { cubin: vec![byte; 100], names: names.into() }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written_and_damage_is_noticed() {
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::open(&home.path().join("kernels")).unwrap();
        let name = key(["sm_90a", "source"]);
        assert_ne!(name, key(["sm_90", "asource"]));
        assert!(cache.read(&name).is_none());
        cache.write(&name, &compiled(7));
        let found = cache.read(&name).unwrap();
        assert_eq!((&found.cubin, &found.names), (&compiled(7).cubin, &compiled(7).names));
        let path = home.path().join("kernels").join(&name);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(cache.read(&name).is_none());
        bytes.truncate(20);
        fs::write(&path, bytes).unwrap();
        assert!(cache.read(&name).is_none());
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_used() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("kernels");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Cache::open(&directory).is_none());
        let link = home.path().join("link");
        std::os::unix::fs::symlink(home.path(), &link).unwrap();
        assert!(Cache::open(&link).is_none());
    }

    #[test]
    fn the_oldest_entries_go() {
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::open(home.path()).unwrap();
        fs::write(home.path().join("notes"), "not of the cache").unwrap();
        for n in 0..CAPACITY + 3 {
            cache.write(&key([n.to_string().as_str()]), &compiled(1));
        }
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), CAPACITY + 1);
        assert!(cache.read(&key([(CAPACITY + 2).to_string().as_str()])).is_some());
    }
}
