// Starts what a page needs: live cells, charts, and the command beside the button of an act.
import { drawCharts } from "./chart.js";
import { startLive } from "./live.js";
import { startActs } from "./acts.js";
import { startTail } from "./tail.js";

drawCharts(document);
startActs(document);
startTail(document);
if (document.body.hasAttribute("data-live-page")) {
  startLive();
}
