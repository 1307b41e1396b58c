"use strict";
// A browser refuses to start a worker from the file system. The search then runs in a hidden frame that has the two
// functions of a worker which it uses: messages in, messages out.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = []; // messages before the script has loaded
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.later(this, data);
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = () => { for (const data of this.queue.splice(0)) this.later(inner, data); this.queue = null; };
      inner.document.head.append(script);
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data); else this.later(this.frame.contentWindow, data);
    }

    later(target, data) {
      setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
