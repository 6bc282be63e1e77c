// Python, in a worker: the page ends it if a program does not end by itself.
try {
  const { loadPyodide } = await import("./pyodide.mjs");
  const python = await loadPyodide({ indexURL: new URL(".", location.href).href });
  const kit = await (await fetch("puzzle.zip")).arrayBuffer();
  python.unpackArchive(new Uint8Array(kit), "zip", { extractDir: "/kit" });
  python.runPython("import sys; sys.path.insert(0, '/kit')\nfrom pyodide.ffi import can_run_sync\nfrom simulated.page import attempt");
  if (!(await python.globals.get("can_run_sync").callPromising())) {
    throw new Error("this browser cannot let a program wait; Chrome, Edge and other new browsers can");
  }
  const attempt = python.globals.get("attempt");
  onmessage = async ({ data: { name, function: program, given, source } }) => {
    try {
      postMessage({ did: JSON.parse(await attempt.callPromising(name, program, given, source)) });
    } catch (error) {
      postMessage({ broken: lastLine(error) });
    }
  };
  postMessage({ ready: true });
} catch (error) {
  postMessage({ failed: lastLine(error) });
}

function lastLine(error) {
  return String(error.message ?? error).trim().split("\n").pop();
}
