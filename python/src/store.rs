//! Stores through which ranks find each other: ours for Python (`TcpStore`, `FileStore`, `PrefixStore`), and a Python object with the methods of
//! torch's stores for our groups.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl::core::{self, Error, ErrorKind, Result, TcpStoreServer};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Raise;
use crate::interrupt::apart;
use crate::options;
use crate::process::{Crossing, detached};

/// A key-value store that all ranks of a job reach. Time-outs are seconds; values are bytes.
#[pyclass(subclass, frozen, module = "oxccl")]
pub(crate) struct Store {
    store: Arc<dyn core::Store>,
}

impl Store {
    fn of(store: impl core::Store + 'static) -> PyClassInitializer<Self> {
        PyClassInitializer::from(Self {
            store: Arc::new(store),
        })
    }

    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        timeout: f64,
        call: impl FnOnce(&dyn core::Store, Instant) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let deadline = options::deadline(timeout).or_raise(py)?;
        let store = self.store.clone();
        apart(py, move || call(&*store, deadline))
    }
}

fn borrowed(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

#[pymethods]
impl Store {
    /// Sets `key`.
    #[pyo3(signature = (key, value, *, timeout=60.0))]
    fn set(&self, py: Python<'_>, key: String, value: Vec<u8>, timeout: f64) -> PyResult<()> {
        self.call(py, timeout, move |s, until| s.set(&key, &value, until))
    }

    /// The value of `key`, waiting until it exists.
    #[pyo3(signature = (key, *, timeout=60.0))]
    fn get<'py>(&self, py: Python<'py>, key: String, timeout: f64) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.call(py, timeout, move |s, until| s.get(&key, until))?;
        Ok(PyBytes::new(py, &value))
    }

    /// Adds to the integer at `key` and gives the new value.
    #[pyo3(signature = (key, amount, *, timeout=60.0))]
    fn add(&self, py: Python<'_>, key: String, amount: i64, timeout: f64) -> PyResult<i64> {
        self.call(py, timeout, move |s, until| s.add(&key, amount, until))
    }

    /// Sets `desired` if the value is `expected`, or if there is none and `expected` is empty. Gives the value that stands then.
    #[pyo3(signature = (key, expected, desired, *, timeout=60.0))]
    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: String,
        expected: Vec<u8>,
        desired: Vec<u8>,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.call(py, timeout, move |s, until| {
            s.compare_set(&key, &expected, &desired, until)
        })?;
        Ok(PyBytes::new(py, &value))
    }

    /// True if all keys exist.
    #[pyo3(signature = (keys, *, timeout=60.0))]
    fn check(&self, py: Python<'_>, keys: Vec<String>, timeout: f64) -> PyResult<bool> {
        self.call(py, timeout, move |s, until| s.check(&borrowed(&keys), until))
    }

    /// Waits until all keys exist.
    #[pyo3(signature = (keys, *, timeout=60.0))]
    fn wait(&self, py: Python<'_>, keys: Vec<String>, timeout: f64) -> PyResult<()> {
        self.call(py, timeout, move |s, until| s.wait(&borrowed(&keys), until))
    }

    /// Removes `key`; true if it existed.
    #[pyo3(signature = (key, *, timeout=60.0))]
    fn delete(&self, py: Python<'_>, key: String, timeout: f64) -> PyResult<bool> {
        self.call(py, timeout, move |s, until| s.delete(&key, until))
    }

    /// Waits until `world_size` callers have entered the barrier `key`, which serves once.
    #[pyo3(signature = (key, world_size, *, timeout=60.0))]
    fn barrier(&self, py: Python<'_>, key: String, world_size: u32, timeout: f64) -> PyResult<()> {
        self.call(py, timeout, move |s, until| s.barrier(&key, world_size, until))
    }
}

/// A client of a `StoreServer`, or of torch's TCPStore, at `host:port`.
#[pyclass(extends = Store, frozen, module = "oxccl")]
pub(crate) struct TcpStore;

#[pymethods]
impl TcpStore {
    #[new]
    #[pyo3(signature = (address, *, timeout=60.0))]
    fn new(py: Python<'_>, address: String, timeout: f64) -> PyResult<PyClassInitializer<Self>> {
        let deadline = options::deadline(timeout).or_raise(py)?;
        let store = apart(py, move || core::TcpStore::connect(&address, deadline))?;
        Ok(Store::of(store).add_subclass(Self))
    }
}

/// A store in a file on a file system that all ranks share.
#[pyclass(extends = Store, frozen, module = "oxccl")]
pub(crate) struct FileStore;

#[pymethods]
impl FileStore {
    #[new]
    fn new(py: Python<'_>, path: std::path::PathBuf) -> PyResult<PyClassInitializer<Self>> {
        let store = core::FileStore::open(path).or_raise(py)?;
        Ok(Store::of(store).add_subclass(Self))
    }
}

/// A view of another store, with `prefix/` before every key.
#[pyclass(extends = Store, frozen, module = "oxccl")]
pub(crate) struct PrefixStore;

#[pymethods]
impl PrefixStore {
    #[new]
    fn new(prefix: String, store: &Bound<'_, PyAny>) -> PyResult<PyClassInitializer<Self>> {
        let inner = any(store)?;
        let store = core::PrefixStore::new(inner, prefix);
        Ok(Store::of(store).add_subclass(Self))
    }
}

/// A store's server, in the protocol of torch's TCPStore.
#[pyclass(frozen, module = "oxccl")]
pub(crate) struct StoreServer {
    server: Arc<TcpStoreServer>,
}

#[pymethods]
impl StoreServer {
    #[new]
    #[pyo3(signature = (bind="127.0.0.1:0"))]
    fn new(py: Python<'_>, bind: &str) -> PyResult<Self> {
        let server = Arc::new(detached(py, || TcpStoreServer::bind(bind)).or_raise(py)?);
        Ok(Self { server })
    }

    /// Where it listens, with the real port.
    #[getter]
    fn address(&self) -> String {
        self.server.local_addr().to_string()
    }

    /// Ends all connections and frees the port.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.server.clone();
        apart(py, move || {
            server.shutdown();
            Ok(())
        })
    }
}

/// A store of ours, or any Python object with the methods of torch's.
pub(crate) fn any(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn core::Store>> {
    if let Ok(ours) = object.cast::<Store>() {
        return Ok(ours.get().store.clone());
    }
    for method in ["set", "get", "add", "check"] {
        if !object.hasattr(method)? {
            let kind = object.get_type().name()?;
            let text = format!("{kind} is no store: it has no method '{method}'");
            return Err(PyTypeError::new_err(text));
        }
    }
    Ok(Arc::new(Foreign {
        object: object.clone().unbind(),
    }))
}

/// A Python object with the methods of torch's stores. Its calls attach to the interpreter, so only configuring and splitting a group go through it.
struct Foreign {
    object: Py<PyAny>,
}

/// The longest time between two looks.
const LOOK: Duration = Duration::from_millis(10);

impl Foreign {
    fn with<T>(
        &self,
        op: &'static str,
        deadline: Instant,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        let _crossing = Crossing::begin().map_err(|e| e.with_op(op))?;
        let called = Python::try_attach(|py| {
            call(self.object.bind(py)).map_err(|e| {
                let is_missing = e.is_instance_of::<PyAttributeError>(py);
                let text = format!("the store said: {}", e.value(py));
                let kind = if is_missing {
                    ErrorKind::Unsupported
                } else if Instant::now() >= deadline {
                    ErrorKind::Timeout
                } else {
                    ErrorKind::Unavailable
                };
                Error::new(kind, text).with_op(op)
            })
        });
        called.unwrap_or_else(|| {
            let text = "the interpreter, to which the store belongs, has ended";
            Err(Error::new(ErrorKind::Unavailable, text).with_op(op))
        })
    }
}

fn bytes<'py>(py: Python<'py>, value: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, value)
}

impl core::Store for Foreign {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.with("store.set", deadline, |s| {
            s.call_method1(intern!(s.py(), "set"), (key, bytes(s.py(), value)))
                .map(drop)
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.wait(&[key], deadline)?;
        self.with("store.get", deadline, |s| {
            s.call_method1(intern!(s.py(), "get"), (key,))?.extract()
        })
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.with("store.add", deadline, |s| {
            s.call_method1(intern!(s.py(), "add"), (key, amount))?.extract()
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.with("store.compare_set", deadline, |s| {
            let (expected, desired) = (bytes(s.py(), expected), bytes(s.py(), desired));
            s.call_method1(intern!(s.py(), "compare_set"), (key, expected, desired))?
                .extract()
        })
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        self.with("store.check", deadline, |s| {
            s.call_method1(intern!(s.py(), "check"), (keys.to_vec(),))?
                .extract()
        })
    }

    /// By looking again and again: a wait in the store's own code would hold up the interpreter's end.
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        let mut pause = Duration::from_millis(1);
        while !self.check(keys, deadline)? {
            if Instant::now() >= deadline {
                let text = format!("the store has no {} yet", keys.join(", "));
                return Err(Error::timeout(text).with_op("store.wait"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOK);
        }
        Ok(())
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.with("store.delete", deadline, |s| {
            s.call_method1(intern!(s.py(), "delete_key"), (key,))?.extract()
        })
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.with("store.append", deadline, |s| {
            s.call_method1(intern!(s.py(), "append"), (key, bytes(s.py(), value)))
                .map(drop)
        })
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, deadline)?;
        keys.iter().map(|key| self.get(key, deadline)).collect()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value, deadline))
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.with("store.num_keys", deadline, |s| {
            s.call_method0(intern!(s.py(), "num_keys"))?.extract()
        })
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let mut keys: Vec<String> = self.with("store.list", deadline, |s| {
            s.call_method0(intern!(s.py(), "list_keys"))?.extract()
        })?;
        keys.sort();
        Ok(keys)
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        let mut arrived = self.add(key, 1, deadline)?;
        while arrived < i64::from(world_size) {
            if Instant::now() >= deadline {
                let text = format!("barrier '{key}' for {world_size} callers; {arrived} arrived");
                return Err(Error::timeout(text).with_op("store.barrier"));
            }
            std::thread::sleep(LOOK);
            arrived = self.add(key, 0, deadline)?;
        }
        Ok(())
    }
}
